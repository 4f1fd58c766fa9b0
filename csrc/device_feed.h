// DeviceFeed: the GPUs that are open, and what of their batches is under way.
//
//   submit -> poll (a piece for a worker) -> give_back -> arrived -> forget
//
// A batch is known here from the moment its copies are given to the device until it is finished,
// so that a piece finds its batch and a guard its copies.
//
// Invariants:
//  1. A piece that a worker has belongs to a batch that is known: what is given to a driver is
//     entered under the same hold of the mutex.
//  2. What may make CUDA wait is done without the mutex, and by upkeep's thread if it happens while
//     training goes on: registering what the media has grown by, and memory aside.
//  3. What lies beyond the part that is registered goes through the ring.
//  4. The registration ends when no copy of any device is under way, and before the context that
//     made it.
//
// Threads: any; open and begin from one at a time. The mutex is taken with no other held; those of
// what it has (a GPU, a mover, a device, the reach) are taken under it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "batch.h"
#include "gpu.h"
#include "reach.h"
#include "store.h"
#include "thread_annotations.h"

namespace lightckpt {

// Where the memory of a batch's spans is, if it is not the host's.
struct OnDevice {
  int ordinal = 0;
  uint64_t stream = 0;  // the caller's, see device_cuda.h
  Snapshot how = Snapshot::kHost;
};

struct DeviceOptions {
  static constexpr int64_t kPatienceNs = 2'000'000'000;

  uint64_t ring_bytes = 0;  // 0 takes Gpu::kRingBytes
  // How long who opens a device, or begins an attempt, waits for what upkeep's thread does for him.
  int64_t patience_ns = kPatienceNs;
};

struct DeviceInfo {
  std::string name;
  int driver_version = 0;  // 12040 is CUDA 12.4
  uint64_t ring_bytes = 0;
  Status direct;  // why copy engines cannot reach the media, or ok
};

class DeviceFeed {
 public:
  // A piece, whose it is, and where to give it back.
  struct Found {
    Gpu* gpu = nullptr;
    Batch* batch = nullptr;
    Piece piece;
  };

  // A batch that has come, or has not, and how.
  struct Arrival {
    Batch* batch = nullptr;
    bool in_place = false;  // copy engines have reached the media, else it went through the ring
    Status status;
  };

  DeviceFeed() = default;
  DeviceFeed(const DeviceFeed&) = delete;
  DeviceFeed& operator=(const DeviceFeed&) = delete;
  ~DeviceFeed();

  // See Engine::open_device. Where CUDA can reach the media's mapping, it is registered.
  Status open(const CudaDriver& driver, int ordinal, const DeviceOptions& options, Store* store,
              DeviceInfo* info);
  Status check_open(int ordinal) const;
  // For a new version in flight, when nothing of the one before is under way any more: the media
  // may have grown.
  void begin(const Media& media);

  // The batch is in the queue already, as one on a device. After an error nothing is under way.
  Status submit(const OnDevice& on, const Media& media, Batch* batch);
  // True: the batch is known here, and this is what its guard says.
  bool stream_wait(uint64_t number, uint64_t stream, int64_t timeout_ns, Status* status);
  // Leaves out what the devices have not been given yet, of writes or of all.
  void cancel(bool writes_only);

  // For the worker whose turn it is to ask the devices.
  bool poll(Found* found);
  void give_back(const Found& found, const Status& status);
  // Tells of each batch of which nothing is under way any more, once.
  bool arrived(Arrival* arrival);
  // It is about to be finished.
  void forget(uint64_t number);

 private:
  struct Opened {
    std::unique_ptr<Gpu> gpu;
    Status may_reach;  // why it may not reach the media, whatever is registered, or ok
  };
  struct Entry {
    Gpu* gpu;
    uint64_t move;
    uint64_t number;
    Batch* batch;
    bool write;
    bool in_place;
  };
  Status open_new(const CudaDriver& driver, int ordinal, uint64_t ring_bytes, Store* store);
  void extend(const Media& media);
  const Opened* find(int ordinal) const REQUIRES(mutex_);
  Status reach_of(const Opened& device) const REQUIRES(mutex_);
  const Entry& entry_of(const Gpu* gpu, uint64_t move) const REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::vector<Opened> devices_ GUARDED_BY(mutex_);   // until the end
  std::unique_ptr<Reach> reach_ GUARDED_BY(mutex_);  // from the first device that may on
  std::vector<Entry> under_way_ GUARDED_BY(mutex_);  // oldest first

  // Of open and begin.
  std::unique_ptr<Upkeep> upkeep_;  // from the first device on
  int64_t patience_ns_ = DeviceOptions::kPatienceNs;
  uint64_t asked_bytes_ = 0;  // that upkeep is to register, or has
};

}  // namespace lightckpt
