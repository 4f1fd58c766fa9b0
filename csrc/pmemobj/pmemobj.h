// Pmemobj: pools of libpmemobj, and transactions on them, which happen whole or not at all.
//
// The library is opened at run time, if it is there. The declarations are those of libpmemobj(7)
// that PMDK 1.12 to 2.1 share. A pool is mapped by one process at a time, which a lock on its file
// sees to; forked children do not have the mapping, so that they do not hold the lock.
//
// Two faults of the library are kept out: opening a file that is too short for a pool ends the
// process, and so does a call outside the stage that it belongs to.
//
// Threads: any, a transaction belongs to the one that runs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "status.h"

namespace lightckpt {

inline constexpr char kPmemobjLibrary[] = "libpmemobj.so.1";
inline constexpr uint64_t kPoolBytesMin = 8 << 20;  // PMEMOBJ_MIN_POOL

struct PmemobjCalls;  // the library's functions

class PmemobjPool {
 public:
  // kNotFound: the library is not there; the message says what to install.
  static Status library();

  // Makes a new pool of `bytes`, all of them allocated, where no file is.
  static Status create(const std::string& path, const char* layout, uint64_t bytes,
                       std::unique_ptr<PmemobjPool>* pool);
  // kBusy: another process, or another handle of this one, has it.
  static Status open(const std::string& path, const char* layout,
                     std::unique_ptr<PmemobjPool>* pool);
  PmemobjPool(const PmemobjPool&) = delete;
  PmemobjPool& operator=(const PmemobjPool&) = delete;
  ~PmemobjPool();

  uint64_t size() const { return size_; }
  std::byte* at(uint64_t offset) const { return static_cast<std::byte*>(pool_) + offset; }

  // The offset of the root object, made of zeros when it is asked for first.
  Status root(uint64_t bytes, uint64_t* offset);
  // Shows all objects but the root: offset, usable bytes and type.
  void each(const std::function<void(uint64_t, uint64_t, uint64_t)>& show) const;

  // Within a transaction. `add` must come before a range is changed; what `alloc` gives is zeros.
  class Transaction {
   public:
    Status add(uint64_t offset, uint64_t bytes);
    Status alloc(uint64_t bytes, uint64_t type, uint64_t* offset);
    Status free(uint64_t offset);

   private:
    friend class PmemobjPool;
    explicit Transaction(const PmemobjPool* pool) : pool_(*pool) {}
    const PmemobjPool& pool_;
  };
  // Runs `body`: what it did is durable if it returns ok, and undone otherwise.
  Status transact(const std::function<Status(Transaction*)>& body);

 private:
  PmemobjPool(const PmemobjCalls* calls, void* pool, std::string path);
  Status failure(const std::string& what, int error) const;

  const PmemobjCalls& calls_;
  void* pool_;
  std::string path_;
  uint64_t size_ = 0;
  uint64_t id_ = 0;
};

}  // namespace lightckpt
