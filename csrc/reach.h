// Reach: what copy engines reach of a mapping of the host: which part of it is registered with
// CUDA, and why no more is.
//
//   extend (upkeep's thread) -> pinned (whoever gives copies)
//
// It only grows: what is registered stays so until the end. So copies in place go on while the part
// that a store has grown by is being registered. A copy does not cross from one part into the next,
// so pinned has their borders.
//
// A registration is of the context that made it, and holds for every other one. That context
// outlives this, and all copies in place are done before the end, those of other devices too.
//
// Threads: any; extend and the end by one at a time. CUDA is called without the mutex.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cuda_objects.h"
#include "status.h"
#include "thread_annotations.h"

namespace lightckpt {

// Why the copies of a device may not go to registered memory and from there, or ok. `read_only`:
// the memory is mapped to be read.
Status may_reach(const CudaDriver& driver, int ordinal, bool read_only);

class Reach {
 public:
  // A part is not larger: so an end waits for no more than that, and drivers have limits of their
  // own from 512 GiB on.
  static constexpr uint64_t kPartBytes = uint64_t{1} << 30;

  Reach(const CudaContext& context, std::byte* memory, bool read_only,
        uint64_t part_bytes = kPartBytes)
      : context_(context), memory_(memory), read_only_(read_only), part_bytes_(part_bytes) {}
  Reach(const Reach&) = delete;
  Reach& operator=(const Reach&) = delete;
  ~Reach() { (void)reset(); }

  // Registers what is not yet, as far as `bytes`, which pins its pages. The first error stays.
  void extend(uint64_t bytes);
  // Lets extend end with the part that it is at.
  void leave_off() { leaving_ = true; }

  // The error that ended it, or ok: all that was asked for is registered, or will be.
  Status status() const;
  CudaPinned pinned() const;
  Status reset();

 private:
  Status add_part(uint64_t from, uint64_t bytes);

  const CudaContext& context_;
  std::byte* const memory_;
  const bool read_only_;
  const uint64_t part_bytes_;
  std::atomic<bool> leaving_ = false;

  mutable Mutex mutex_;
  Status status_ GUARDED_BY(mutex_);
  CudaPinned pinned_ GUARDED_BY(mutex_);
  std::vector<CudaRegistered> parts_ GUARDED_BY(mutex_);
};

}  // namespace lightckpt
