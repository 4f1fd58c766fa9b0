// Calling libpmem2 through pointers. See pmem2.h.
#include "pmem2.h"

#include <dlfcn.h>

#include "fork.h"

namespace lightckpt {
namespace {

// From libpmem2/base.h.
constexpr int kNoBadBlockFound = -100029;
constexpr int kFirstOwnError = -100000;
constexpr int kGranularityPage = 2;

constexpr size_t kShown = 4;

struct Pmem2BadBlock {
  size_t offset;
  size_t length;
};

}  // namespace

struct Pmem2Calls {
  const char* (*errormsg)();
  int (*source_from_fd)(void** source, int fd);
  int (*source_delete)(void** source);
  int (*source_device_id)(const void* source, char* id, size_t* bytes);
  int (*source_device_usc)(const void* source, uint64_t* count);
  int (*badblock_context_new)(void** context, const void* source);
  int (*badblock_next)(void* context, Pmem2BadBlock* block);
  void (*badblock_context_delete)(void** context);
  int (*config_new)(void** config);
  int (*config_delete)(void** config);
  int (*config_set_required_store_granularity)(void* config, int granularity);
  int (*map_new)(void** map, const void* config, const void* source);
  int (*map_delete)(void** map);
  void* (*map_get_address)(void* map);
  size_t (*map_get_size)(void* map);
  int (*map_get_store_granularity)(void* map);
  void (*(*get_persist_fn)(void* map))(const void*, size_t);
  void (*(*get_flush_fn)(void* map))(const void*, size_t);
  void (*(*get_drain_fn)(void* map))();
  int (*deep_flush)(void* map, void* address, size_t bytes);

  // Returns the name of the first function that the library lacks, or null.
  const char* find(void* library) {
    const char* missing = nullptr;
    const auto take = [&](auto* call, const char* name) {
      *call = reinterpret_cast<std::remove_pointer_t<decltype(call)>>(dlsym(library, name));
      if (*call == nullptr && missing == nullptr) missing = name;
    };
    take(&errormsg, "pmem2_errormsg");
    take(&source_from_fd, "pmem2_source_from_fd");
    take(&source_delete, "pmem2_source_delete");
    take(&source_device_id, "pmem2_source_device_id");
    take(&source_device_usc, "pmem2_source_device_usc");
    take(&badblock_context_new, "pmem2_badblock_context_new");
    take(&badblock_next, "pmem2_badblock_next");
    take(&badblock_context_delete, "pmem2_badblock_context_delete");
    take(&config_new, "pmem2_config_new");
    take(&config_delete, "pmem2_config_delete");
    take(&config_set_required_store_granularity, "pmem2_config_set_required_store_granularity");
    take(&map_new, "pmem2_map_new");
    take(&map_delete, "pmem2_map_delete");
    take(&map_get_address, "pmem2_map_get_address");
    take(&map_get_size, "pmem2_map_get_size");
    take(&map_get_store_granularity, "pmem2_map_get_store_granularity");
    take(&get_persist_fn, "pmem2_get_persist_fn");
    take(&get_flush_fn, "pmem2_get_flush_fn");
    take(&get_drain_fn, "pmem2_get_drain_fn");
    take(&deep_flush, "pmem2_deep_flush");
    return missing;
  }
};

// A pmem2_source for as long as a call needs it; it does not own the descriptor.
struct Pmem2::Source {
  Source(const Pmem2Calls& calls_of, int fd) : calls(calls_of) {
    error = calls.source_from_fd(&source, fd);
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  ~Source() {
    if (source != nullptr) calls.source_delete(&source);
  }

  const Pmem2Calls& calls;
  void* source = nullptr;
  int error = 0;
};

std::string words_of(const std::vector<BadBlock>& blocks) {
  std::string words;
  for (size_t i = 0; i < blocks.size() && i < kShown; ++i) {
    if (i > 0) words += ", ";
    words += std::to_string(blocks[i].offset) + " to " +
             std::to_string(blocks[i].offset + blocks[i].bytes);
  }
  if (blocks.size() > kShown) words += " and " + std::to_string(blocks.size() - kShown) + " more";
  return words;
}

Pmem2::Pmem2(std::unique_ptr<Pmem2Calls> calls) : calls_(std::move(calls)) {}
Pmem2::~Pmem2() = default;

Status Pmem2::load(const Pmem2** library) {
  struct Loaded {
    std::unique_ptr<Pmem2> library;
    Status status = load(kPmem2Library, &library);
  };
  static constinit std::atomic<const Loaded*> kept = nullptr;
  const Loaded& loaded = load_once(&kept, [] { return std::make_unique<const Loaded>(); });
  *library = loaded.library.get();
  return loaded.status;
}

Status Pmem2::load(const char* name, std::unique_ptr<Pmem2>* library) {
  void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return {Code::kNotFound, std::string("libpmem2 cannot be used (") + (why ? why : name) +
                                 "): apt-get install libpmem2-1, or libpmem2 on Debian 12"};
  }
  auto calls = std::make_unique<Pmem2Calls>();
  if (const char* missing = calls->find(handle); missing != nullptr) {
    dlclose(handle);
    return {Code::kNotFound, std::string(name) + " has no " + missing + ": PMDK 1.12 has"};
  }
  library->reset(new Pmem2(std::move(calls)));
  return {};
}

Status Pmem2::failure(const std::string& what, int error) const {
  const std::string message = what + ": " + calls_->errormsg();
  // Its own errors are of what the media is or was asked for; the rest are errno, negated.
  if (error <= kFirstOwnError) return {Code::kInvalid, message};
  return {from_errno("", -error).code(), message};
}

Status Pmem2::bad_blocks(int fd, std::vector<BadBlock>* found) const {
  found->clear();
  const Source of(*calls_, fd);
  if (of.error != 0) return failure("cannot look for bad blocks", of.error);
  void* context = nullptr;
  int error = calls_->badblock_context_new(&context, of.source);
  if (error != 0) return failure("cannot look for bad blocks", error);
  Pmem2BadBlock block = {};
  while ((error = calls_->badblock_next(context, &block)) == 0) {
    found->push_back({block.offset, block.length});
  }
  Status status;
  if (error != kNoBadBlockFound) status = failure("cannot list the bad blocks", error);
  calls_->badblock_context_delete(&context);
  return status;
}

Status Pmem2::unsafe_shutdowns(int fd, uint64_t* count) const {
  const Source of(*calls_, fd);
  int error = of.error;
  if (error == 0) error = calls_->source_device_usc(of.source, count);
  if (error != 0) return failure("cannot tell the count of unsafe shutdowns", error);
  return {};
}

Status Pmem2::device_id(int fd, std::string* id) const {
  const Source of(*calls_, fd);
  size_t bytes = 0;
  int error = of.error;
  if (error == 0) error = calls_->source_device_id(of.source, nullptr, &bytes);
  if (error == 0) {
    id->assign(bytes, '\0');
    error = calls_->source_device_id(of.source, id->data(), &bytes);
    id->resize(std::char_traits<char>::length(id->c_str()));
  }
  if (error != 0) return failure("cannot tell the device's identity", error);
  return {};
}

Status Pmem2::map(int fd, std::unique_ptr<Pmem2Map>* map) const {
  const Source of(*calls_, fd);
  if (of.error != 0) return failure("cannot map", of.error);
  void* config = nullptr;
  void* mapped = nullptr;
  int error = calls_->config_new(&config);
  // The coarsest that is good enough; what it really is, the map says.
  if (error == 0) error = calls_->config_set_required_store_granularity(config, kGranularityPage);
  if (error == 0) error = calls_->map_new(&mapped, config, of.source);
  Status status;
  if (error != 0) status = failure("cannot map", error);
  if (config != nullptr) calls_->config_delete(&config);
  if (status.ok()) map->reset(new Pmem2Map(this, mapped));
  return status;
}

Pmem2Map::Pmem2Map(const Pmem2* library, void* map) : library_(library), map_(map) {
  const Pmem2Calls& calls = *library->calls_;
  view_ = static_cast<std::byte*>(calls.map_get_address(map));
  size_ = calls.map_get_size(map);
  granularity_ = static_cast<Granularity>(calls.map_get_store_granularity(map));
  persist_ = calls.get_persist_fn(map);
  flush_ = calls.get_flush_fn(map);
  drain_ = calls.get_drain_fn(map);
}

Pmem2Map::~Pmem2Map() { library_->calls_->map_delete(&map_); }

void Pmem2Map::persist(uint64_t offset, uint64_t bytes) const {
  CHECK(bytes <= size_ && offset <= size_ - bytes);
  persist_(view_ + offset, bytes);
}

void Pmem2Map::flush(uint64_t offset, uint64_t bytes) const {
  CHECK(bytes <= size_ && offset <= size_ - bytes);
  flush_(view_ + offset, bytes);
}

void Pmem2Map::drain() const { drain_(); }

Status Pmem2Map::deep_flush(uint64_t offset, uint64_t bytes) const {
  CHECK(bytes <= size_ && offset <= size_ - bytes);
  const int error = library_->calls_->deep_flush(map_, view_ + offset, bytes);
  return error == 0 ? Status() : library_->failure("cannot flush deeply", error);
}

}  // namespace lightckpt
