// Calling libpmemobj through pointers. See pmemobj.h.
#include "pmemobj/pmemobj.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "fork.h"

namespace lightckpt {

namespace {

constexpr int kStageNone = 0;
constexpr int kStageWork = 1;
constexpr uint64_t kZeroed = 1;  // POBJ_XALLOC_ZERO
constexpr mode_t kMode = 0600;

struct Oid {
  uint64_t pool;
  uint64_t offset;
};

}  // namespace

struct PmemobjCalls {
  const char* (*errormsg)();
  void* (*create)(const char* path, const char* layout, size_t bytes, mode_t mode);
  void* (*open)(const char* path, const char* layout);
  void (*close)(void* pool);
  int (*ctl_set)(void* pool, const char* name, void* value);
  Oid (*oid)(const void* address);
  Oid (*root)(void* pool, size_t bytes);
  Oid (*first)(void* pool);
  Oid (*next)(Oid oid);
  uint64_t (*type_num)(Oid oid);
  size_t (*usable_size)(Oid oid);
  int (*tx_stage)();
  int (*tx_begin)(void* pool, void* jump, ...);
  void (*tx_abort)(int error);
  void (*tx_commit)();
  int (*tx_end)();
  int (*tx_add_range)(Oid oid, uint64_t offset, size_t bytes);
  Oid (*tx_xalloc)(size_t bytes, uint64_t type, uint64_t flags);
  int (*tx_free)(Oid oid);

  Status status;

  PmemobjCalls() {
    void* const handle = dlopen(kPmemobjLibrary, RTLD_NOW | RTLD_LOCAL);
    const char* missing = nullptr;
    if (handle == nullptr) {
      const char* why = dlerror();
      status = {Code::kNotFound, std::string("libpmemobj cannot be used (") +
                                     (why != nullptr ? why : kPmemobjLibrary) +
                                     "): install Debian's libpmemobj1, or your system's PMDK"};
      return;
    }
    const auto take = [&](auto* call, const char* name) {
      *call = reinterpret_cast<std::remove_pointer_t<decltype(call)>>(dlsym(handle, name));
      if (*call == nullptr && missing == nullptr) missing = name;
    };
    take(&errormsg, "pmemobj_errormsg");
    take(&create, "pmemobj_create");
    take(&open, "pmemobj_open");
    take(&close, "pmemobj_close");
    take(&ctl_set, "pmemobj_ctl_set");
    take(&oid, "pmemobj_oid");
    take(&root, "pmemobj_root");
    take(&first, "pmemobj_first");
    take(&next, "pmemobj_next");
    take(&type_num, "pmemobj_type_num");
    take(&usable_size, "pmemobj_alloc_usable_size");
    take(&tx_stage, "pmemobj_tx_stage");
    take(&tx_begin, "pmemobj_tx_begin");
    take(&tx_abort, "pmemobj_tx_abort");
    take(&tx_commit, "pmemobj_tx_commit");
    take(&tx_end, "pmemobj_tx_end");
    take(&tx_add_range, "pmemobj_tx_add_range");
    take(&tx_xalloc, "pmemobj_tx_xalloc");
    take(&tx_free, "pmemobj_tx_free");
    if (missing != nullptr) {
      status = {Code::kNotFound, std::string("this libpmemobj lacks ") + missing};
    }
  }
};

namespace {

const PmemobjCalls& calls() {
  static constinit std::atomic<const PmemobjCalls*> kept = nullptr;
  return load_once(&kept, [] { return std::make_unique<const PmemobjCalls>(); });
}

// The library's words are of this thread's last failure, so they are asked for at once.
Status failure_of(const std::string& what, int error) {
  const Status plain = from_errno(what, error);
  const bool taken = error == EAGAIN || error == EWOULDBLOCK || error == EBUSY;
  return {taken ? Code::kBusy : plain.code(), plain.message() + " (" + calls().errormsg() + ")"};
}

}  // namespace

Status PmemobjPool::library() { return calls().status; }

Status PmemobjPool::failure(const std::string& what, int error) const {
  return failure_of("cannot " + what + " in the pool " + path_, error);
}

PmemobjPool::PmemobjPool(const PmemobjCalls* library, void* pool, std::string path)
    : calls_(*library), pool_(pool), path_(std::move(path)) {}

PmemobjPool::~PmemobjPool() { calls_.close(pool_); }

Status PmemobjPool::create(const std::string& path, const char* layout, uint64_t bytes,
                           std::unique_ptr<PmemobjPool>* pool) {
  RETURN_IF_ERROR(library());
  void* made = calls().create(path.c_str(), layout, bytes, kMode);
  if (made == nullptr && errno != EEXIST && errno != ENOSPC) {
    // From PMDK 2.1 on, a place that does not count unsafe shutdowns must be allowed by name. What
    // the count would tell is in the store's header, where there is one.
    const ForkLock lock;  // the setting is the process's, and a child's too
    int at_create = 0;
    calls().ctl_set(nullptr, "sds.at_create", &at_create);
    made = calls().create(path.c_str(), layout, bytes, kMode);
    at_create = 1;
    const int error = errno;
    calls().ctl_set(nullptr, "sds.at_create", &at_create);
    errno = error;
  }
  if (made == nullptr) {
    return failure_of("cannot make a pool of " + std::to_string(bytes) + " bytes at " + path,
                      errno);
  }
  calls().close(made);
  return open(path, layout, pool);
}

Status PmemobjPool::open(const std::string& path, const char* layout,
                         std::unique_ptr<PmemobjPool>* pool) {
  RETURN_IF_ERROR(library());
  struct stat file = {};
  if (stat(path.c_str(), &file) != 0) return from_errno("cannot look at the pool " + path);
  const auto bytes = static_cast<uint64_t>(file.st_size);
  if (!S_ISREG(file.st_mode) || bytes < kPoolBytesMin) {
    return {Code::kFormat, path + " is no pool: " + std::to_string(bytes) + " bytes, and one has " +
                               std::to_string(kPoolBytesMin) + " at least"};
  }
  void* const opened = calls().open(path.c_str(), layout);
  if (opened == nullptr) {
    const int error = errno;
    const Status status = failure_of("cannot open the pool " + path, error);
    return {error == EINVAL ? Code::kFormat : status.code(), status.message()};
  }
  pool->reset(new PmemobjPool(&calls(), opened, path));
  (*pool)->size_ = bytes;
  madvise(opened, bytes, MADV_DONTFORK);
  return {};
}

Status PmemobjPool::root(uint64_t bytes, uint64_t* offset) {
  const Oid oid = calls_.root(pool_, bytes);
  if (oid.offset == 0) return failure("make the root object", errno);
  id_ = oid.pool;
  *offset = oid.offset;
  return {};
}

void PmemobjPool::each(const std::function<void(uint64_t, uint64_t, uint64_t)>& show) const {
  for (Oid oid = calls_.first(pool_); oid.offset != 0; oid = calls_.next(oid)) {
    show(oid.offset, calls_.usable_size(oid), calls_.type_num(oid));
  }
}

Status PmemobjPool::transact(const std::function<Status(Transaction*)>& body) {
  CHECK(calls_.tx_stage() == kStageNone);
  // The end of the parameters is TX_PARAM_NONE, an int. Without a jump buffer a call that fails
  // returns, and leaves the transaction aborted.
  if (const int error = calls_.tx_begin(pool_, nullptr, 0); error != 0) {
    calls_.tx_end();
    return failure("begin a transaction", error);
  }
  Transaction transaction(this);
  Status status = body(&transaction);
  if (calls_.tx_stage() == kStageWork) {
    status.ok() ? calls_.tx_commit() : calls_.tx_abort(ECANCELED);
  }
  const int error = calls_.tx_end();
  return !status.ok() || error == 0 ? status : failure("commit a transaction", error);
}

Status PmemobjPool::Transaction::add(uint64_t offset, uint64_t bytes) {
  const int error = pool_.calls_.tx_add_range({pool_.id_, offset}, 0, bytes);
  return error == 0 ? Status() : pool_.failure("log " + std::to_string(bytes) + " bytes", error);
}

Status PmemobjPool::Transaction::alloc(uint64_t bytes, uint64_t type, uint64_t* offset) {
  const Oid oid = pool_.calls_.tx_xalloc(bytes, type, kZeroed);
  if (oid.offset == 0) return pool_.failure("allocate " + std::to_string(bytes) + " bytes", errno);
  *offset = oid.offset;
  return {};
}

Status PmemobjPool::Transaction::free(uint64_t offset) {
  const int error = pool_.calls_.tx_free({pool_.id_, offset});
  return error == 0 ? Status() : pool_.failure("free an object", error);
}

}  // namespace lightckpt
