// Gpu: one GPU as the engine uses it. It knows three ways out of the GPU's memory, which are those
// of LightCheck's three variants (D, C and G):
//
//   direct   the copy engine writes into the media, whose mapping is registered with CUDA
//   host     through the ring of pinned staging; workers copy on to the media
//   device   aside on the GPU first, and from there by one of the other two: the guard waits for a
//            copy at the speed of the GPU's own memory, which must have room for it
//
// and two ways back in: direct (the copy engine reads the media), and through the ring.
//
// Threads: any, but `cover` and `begin`: one at a time, with nothing in place under way.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda_objects.h"
#include "device_cuda.h"
#include "mover.h"
#include "status.h"

namespace lightckpt {

enum class Snapshot : uint32_t { kHost = 0, kDirect, kDevice };

// What a batch has become: a move, and the copy aside before it, or 0.
struct Moved {
  uint64_t move = 0;
  uint64_t aside = 0;
};

class Gpu {
 public:
  static constexpr uint64_t kPieceBytes = 4 << 20;   // of the ring: four chunks
  static constexpr uint64_t kRingBytes = 128 << 20;  // unless another size is asked for
  static constexpr uint32_t kLanes = 2;

  // `ring_bytes` is rounded up to whole pieces; 0 takes kRingBytes. A mapping is registered once
  // for all devices: where there is a `first` one, which outlives this one, that has done so.
  static Status open(const CudaDriver& driver, int ordinal, uint64_t ring_bytes, const Gpu* first,
                     std::unique_ptr<Gpu>* gpu);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu();

  int ordinal() const { return context_->ordinal(); }
  uint64_t ring_bytes() const { return ring_bytes_; }
  Mover& mover() { return *mover_; }

  // Lets the copy engine reach the media's mapping: all of it, anew where it has grown. That pins
  // its pages. What comes back is kept, and `reach` says it again. Of the first device only.
  Status cover(std::byte* memory, uint64_t bytes);
  // Or does not, for this reason.
  void keep_off(const Status& why) { reach_ = why; }
  const Status& reach() const { return first_->reach_; }

  // A new attempt, which takes the memory aside of the one before. Copies of that one may be under
  // way still, if it was dropped: those of the new one come after them.
  Status begin();

  // After all that `stream` has been given. The spans have their places. kBusy: the stream captures
  // a CUDA graph. kNoSpace: no room on the GPU for a copy aside.
  Status submit(Way way, Snapshot how, uint64_t stream, std::span<const DeviceSpan> spans,
                Moved* moved);
  // What the stream is given from now on comes after the batch's copies out of the GPU's memory, or
  // into it. See Mover::stream_wait.
  Status stream_wait(const Moved& moved, uint64_t stream, int64_t timeout_ns);

 private:
  struct Aside {
    CudaMemory memory;
    uint64_t bytes = 0;
  };
  Gpu() = default;
  Status copy_aside(uint32_t lane, std::vector<DeviceSpan>* spans, uint64_t* copy);

  const Gpu* first_ = this;
  std::unique_ptr<CudaContext> context_;
  std::vector<Aside> asides_;  // one per batch of an attempt, used again by the next
  size_t next_aside_ = 0;
  CudaRegistration registration_;
  Status reach_{Code::kNotFound, "the media has not been registered"};
  uint64_t ring_bytes_ = 0;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<Mover> mover_;  // ends first
};

}  // namespace lightckpt
