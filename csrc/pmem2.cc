// Calling libpmem2 through pointers. See pmem2.h.
#include "pmem2.h"

#include <dlfcn.h>

#include "fork.h"

namespace lightckpt {
namespace {

// From libpmem2/base.h.
constexpr int kNoBadBlockFound = -100029;
constexpr int kFirstOwnError = -100000;

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
  int (*source_device_usc)(const void* source, uint64_t* count);
  int (*badblock_context_new)(void** context, const void* source);
  int (*badblock_next)(void* context, Pmem2BadBlock* block);
  void (*badblock_context_delete)(void** context);

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
    take(&source_device_usc, "pmem2_source_device_usc");
    take(&badblock_context_new, "pmem2_badblock_context_new");
    take(&badblock_next, "pmem2_badblock_next");
    take(&badblock_context_delete, "pmem2_badblock_context_delete");
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

}  // namespace lightckpt
