// CudaDevice: copies out of and into the memory of one GPU, in order with the caller's stream,
// while no host thread waits.
//
//   order_after(stream) -> lane   what the lane is given from here on comes after all that the
//                                 stream was given before: a copy reads the last update
//   copy_out, copy_in   -> copy   copies on the lane, and an event behind them
//   stream_wait(copy, stream)     the guard: what the stream is given from here on comes after the
//                                 copy, so that it reads nothing of the next update
//   done, wait                    for who goes on with the bytes on the host
//
// A lane is a stream of our own, of the highest priority; what it is given happens in order. For
// the other direction the same calls are made: load after what the stream has, and let the stream
// wait for the loaded bytes.
//
// A stream is a CUstream as an integer, as torch gives it: 0 (and 1) is the legacy default stream
// of this device, 2 the calling thread's own default stream. It must be of this device.
//
// Invariants:
//  1. Memory of both sides stays until its copy is done. What wants to free it waits first; the end
//     of a CudaDevice waits for all.
//  2. Nothing of ours gets into a CUDA graph: a stream that records one is refused with kBusy.
//  3. In steady state nothing is made: events come back when their copy was seen done.
//  4. A copy that failed half way is known by its number nevertheless, so that 1 can be kept.
//
// Threads: any; the end by one alone. No other mutex of ours is taken under this one's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cuda_objects.h"
#include "status.h"
#include "thread_annotations.h"

namespace lightckpt {

struct CudaSpan {
  CudaPointer device;
  uint64_t offset;  // in the host's memory
  uint64_t bytes;
};

// Both on the device.
struct CudaPair {
  CudaPointer target;
  CudaPointer source;
  uint64_t bytes;
};

class CudaDevice {
 public:
  static constexpr size_t kCopiesMax = 4096;  // that are not done

  // The context must outlive it.
  static Status open(const CudaContext& context, uint32_t lanes,
                     std::unique_ptr<CudaDevice>* device);
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice() { (void)close(); }

  const CudaContext& context() const { return context_; }
  uint32_t lanes() const { return static_cast<uint32_t>(lanes_.size()); }

  // Lanes take turns.
  Status order_after(uint64_t stream, uint32_t* lane);

  // `*copy` is 0 where nothing was begun. After an error it may be another number: then some of it
  // is under way.
  Status copy_out(uint32_t lane, std::span<const CudaSpan> spans, const CudaPinned& target,
                  uint64_t* copy);
  Status copy_in(uint32_t lane, std::span<const CudaSpan> spans, const CudaPinned& source,
                 uint64_t* copy);
  Status copy_aside(uint32_t lane, std::span<const CudaPair> pairs, uint64_t* copy);

  Status stream_wait(uint64_t copy, uint64_t stream);
  // An error is CUDA's, mostly of earlier work; whether the copy is done is then not known.
  Status done(uint64_t copy, bool* done);
  // kTimeout; timeout_ns < 0 waits for ever, 0 polls.
  Status wait(uint64_t copy, int64_t timeout_ns);

  // Waits until nothing is under way, as long as it takes, and ends; or CUDA says twice that it
  // cannot wait, which it does when the context is lost.
  Status close();

 private:
  // A number is the generation and the index of a record, so that an old one finds nothing.
  struct Copy {
    CudaEvent event;
    uint64_t generation = 1;
    uint32_t lane = 0;
    bool under_way = false;
    bool recorded = false;  // else it is done when all of its lane is
  };
  explicit CudaDevice(const CudaContext& context)
      : context_(context), copies_many_(context.driver().in_batches()) {}

  template <typename Gather, typename Each>
  Status copy_with(uint32_t lane, uint64_t* number, const Gather& gather, const Each& each)
      REQUIRES(mutex_);
  template <typename Gather, typename Each>
  Status give(Copy* copy, const Gather& gather, const Each& each) REQUIRES(mutex_);
  template <typename Each>
  Status enqueue(CudaStreamHandle stream, const Each& each) REQUIRES(mutex_);
  void add(CudaPointer target, CudaPointer source, uint64_t bytes) REQUIRES(mutex_);
  Status order_inside(uint64_t stream, uint32_t* lane) REQUIRES(mutex_);
  Status take_free(uint32_t* index) REQUIRES(mutex_);
  Copy* find(uint64_t number) REQUIRES(mutex_);
  uint64_t number_of(uint32_t index) const REQUIRES(mutex_);
  Status query(Copy* copy, bool* done) REQUIRES(mutex_);
  Status refuse_capture(CudaStreamHandle stream) const;

  const CudaContext& context_;
  std::vector<CudaStream> lanes_;  // stand still until the end

  Mutex mutex_;  // also keeps the order of what lanes are given
  CondVar has_done_;
  CudaEvent ready_ GUARDED_BY(mutex_);  // recorded on a caller's stream, and waited for at once
  uint32_t next_lane_ GUARDED_BY(mutex_) = 0;
  std::vector<Copy> copies_ GUARDED_BY(mutex_);
  std::vector<uint32_t> free_ GUARDED_BY(mutex_);
  // The parts of the copy that is being given.
  std::vector<CudaPointer> targets_ GUARDED_BY(mutex_);
  std::vector<CudaPointer> sources_ GUARDED_BY(mutex_);
  std::vector<size_t> sizes_ GUARDED_BY(mutex_);
  bool copies_many_ GUARDED_BY(mutex_);      // hundreds of small ones in few calls of the driver
  size_t next_look_ GUARDED_BY(mutex_) = 0;  // where to look for one that is done
};

}  // namespace lightckpt
