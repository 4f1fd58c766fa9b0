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
//  2. The mapping is registered anew only while nothing in place is under way.
//
// Threads: any; open and cover from one at a time. The mutex is taken with no other held; a GPU's
// own are taken under it (mover, then device).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "batch.h"
#include "gpu.h"
#include "media.h"
#include "thread_annotations.h"

namespace lightckpt {

// Where the memory of a batch's spans is, if it is not the host's.
struct OnDevice {
  int ordinal = 0;
  uint64_t stream = 0;  // the caller's, see device_cuda.h
  Snapshot how = Snapshot::kHost;
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

  // See Engine::open_device. Where CUDA can reach the media's mapping, it is registered.
  Status open(const CudaDriver& driver, int ordinal, uint64_t ring_bytes, const Media& media,
              DeviceInfo* info);
  Status check_open(int ordinal) const;
  // For a new version in flight: the media may have grown. Where a device does not reach the new
  // part, it is told to whoever submits.
  Status cover(const Media& media);

  // The batch is in the queue already, as one on a device.
  Status submit(const OnDevice& on, const Media& media, Batch* batch);
  // True: the batch is known here, and this is what its guard says.
  bool stream_wait(uint64_t number, uint64_t stream, int64_t timeout_ns, Status* status);
  // Leaves out what the devices have not been given yet, of writes or of all.
  void cancel(bool writes_only);

  // For the worker whose turn it is to ask the devices.
  bool poll(Found* found);
  void give_back(const Found& found, const Status& status);
  // Tells of each batch of which nothing is under way any more, once, with how that went.
  bool arrived(Batch** batch, Status* status);
  // It is about to be finished.
  void forget(uint64_t number);

 private:
  struct Entry {
    Gpu* gpu;
    Moved moved;
    uint64_t number;
    Batch* batch;
    bool write;
    bool in_place;
  };
  Gpu* find(int ordinal) const REQUIRES(mutex_);
  Batch* batch_of(const Gpu* gpu, uint64_t move) const REQUIRES(mutex_);
  bool any_in_place() const REQUIRES(mutex_);

  mutable Mutex mutex_;
  CondVar has_forgotten_;
  std::vector<std::unique_ptr<Gpu>> gpus_ GUARDED_BY(mutex_);  // until the end
  std::vector<Entry> under_way_ GUARDED_BY(mutex_);            // oldest first
};

}  // namespace lightckpt
