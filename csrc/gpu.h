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
// Memory aside is allocated by upkeep's thread, and used again by the next attempt. Where it has
// not come in time, a batch goes without: only its guard waits for longer.
//
// Threads: any, but `begin`: while no copy is under way that reads or writes memory aside.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda_objects.h"
#include "deadline.h"
#include "device_cuda.h"
#include "mover.h"
#include "status.h"
#include "thread_annotations.h"
#include "upkeep.h"

namespace lightckpt {

enum class Snapshot : uint32_t { kHost = 0, kDirect, kDevice };

class Gpu {
 public:
  static constexpr uint64_t kPieceBytes = 4 << 20;   // of the ring: four chunks
  static constexpr uint64_t kRingBytes = 128 << 20;  // unless another size is asked for
  static constexpr uint32_t kLanes = 2;

  // `ring_bytes` is rounded up to whole pieces; 0 takes kRingBytes. An attempt waits no longer than
  // `patience_ns` for memory aside. Both are kept: the driver, and the upkeep, which ends first.
  static Status open(const CudaDriver& driver, int ordinal, uint64_t ring_bytes,
                     int64_t patience_ns, Upkeep* upkeep, std::unique_ptr<Gpu>* gpu);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu() { close(); }

  const CudaContext& context() const { return *context_; }
  int ordinal() const { return context_->ordinal(); }
  uint64_t ring_bytes() const { return ring_bytes_; }
  Mover& mover() { return *mover_; }

  // A new attempt, which takes the memory aside of the one before.
  void begin();
  // Memory aside for all of the spans; 0 where it has not come yet. kNoSpace: the GPU has no room.
  Status take_aside(std::span<const DeviceSpan> spans, CudaPointer* aside);

  // After all that `stream` has been given. The spans have their places if `places` is not null;
  // they are copied aside first if `aside` is not 0. kBusy: the stream captures a CUDA graph.
  Status submit(Way way, uint64_t stream, std::span<const DeviceSpan> spans,
                const CudaPinned* places, CudaPointer aside, uint64_t* move);

  // Waits for what is under way, as long as it takes: only then may the memory go that it is under
  // way to. The context stays.
  void close();

 private:
  struct Aside {
    CudaMemory memory;
    uint64_t bytes = 0;
    bool asked_for = false;  // upkeep is to bring it, or has it in hand
    Status status;           // of the last time
  };
  Gpu(int64_t patience_ns, Upkeep* upkeep)
      : patience_ns_(patience_ns), upkeep_(upkeep), aside_until_(patience_ns) {}
  void bring_aside(size_t index, uint64_t bytes);

  const int64_t patience_ns_;
  Upkeep* const upkeep_;
  std::unique_ptr<CudaContext> context_;
  uint64_t ring_bytes_ = 0;

  Mutex aside_mutex_;
  std::vector<Aside> asides_ GUARDED_BY(aside_mutex_);  // one per batch of an attempt
  size_t next_aside_ GUARDED_BY(aside_mutex_) = 0;
  Deadline aside_until_ GUARDED_BY(aside_mutex_);

  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<Mover> mover_;  // ends first
};

}  // namespace lightckpt
