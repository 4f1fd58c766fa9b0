// Engine: worker threads that move extents between memory and one store.
//
// Work comes in batches (a layer to write, a version to read, a commit); a batch is cut into
// chunks, and workers do these.
//
//   begin -> submit(write)... -> wait(copied) -> queue_commit -> wait(durable)    or drop at any
//   time
//
// Its parts, each with a mutex of its own, of which no two are ever held together:
//
//   BatchQueue   the unfinished batches in order, turns of workers, reports
//   Draft        the version in flight: its one state, its record, its verdict
//   DeviceFeed   GPUs that are open, and what of their batches is under way
//
// Bounded: at most kBatchesMax batches are unfinished at once, one version is in flight. The first
// failure that says that the media is lost sticks: every later begin, write and commit returns it.
// Any other costs the batch that met it, and the version in flight where it was a write of that.
//
// A batch's source memory must not change until it is done. The engine cannot know; its callers
// compare version counters, or checksums through the check operation.
//
// A batch may be of memory on a GPU (submit_on): then pieces of it arrive when the device has
// copied them, and workers take those. One idle worker at a time asks the devices whether there is
// one; no other thread does. The guard of such a batch lets a stream wait, not a thread
// (stream_wait). So a commit may be queued before the last piece has arrived: it waits for the
// batches of its version, and is refused where a check among them found other bytes.
//
// Who waits for a batch does its share of it, rather than wait for a worker to get a core: guards
// and boundaries do, in every step, while the trainer's own threads may still spin. Commits are
// left to workers, and so is all but a check, which touches no media, where that is a disk: a
// thread that hangs there could not give up at its deadline.
//
// An exception on a worker (there is no host memory) is an error of what it was doing: of the
// batch, and of the version in flight. From begin on workers allocate nothing but messages, and
// the ranges that a plain file is to sync.
//
// Threads: submit, wait and stat from any; begin, commit, drop from one at a time. Workers block
// all signals but those that a fault in them raises.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "batch_queue.h"
#include "device_feed.h"
#include "draft.h"
#include "store.h"

namespace lightckpt {

class Engine {
 public:
  static constexpr size_t kBatchesMax = BatchQueue::kBatchesMax;
  static constexpr size_t kReports = BatchQueue::kReports;
  using Counters = Draft::Counters;

  Engine(std::unique_ptr<Store> store, uint32_t workers);
  ~Engine();

  Store& store() { return *store_; }
  uint32_t workers() const { return static_cast<uint32_t>(threads_.size()); }

  Status begin(uint64_t step, uint32_t keep, std::vector<uint64_t> extents, Bytes blob,
               uint64_t host_bytes);
  // `version` 0 is the one in flight; kWrite takes no other, kRead, kVerify, kCopy only others.
  Status submit(Op op, uint64_t version, std::span<const Span> spans, uint64_t* batch);
  // Makes a GPU ready, and tries whether its copy engines reach the media; later calls only say so
  // again. The driver is kept. One at a time, and not beside begin.
  Status open_device(const CudaDriver& driver, int ordinal, const DeviceOptions& options,
                     DeviceInfo* info);
  // Submits what is in memory on a device that is open. Not kVerify. After an error nothing of it
  // is under way; else nothing is when wait says anything but kTimeout.
  Status submit_on(const OnDevice& on, Op op, uint64_t version, std::span<const Span> spans,
                   uint64_t* batch);
  // The guard: what `stream` is given from now on comes after the batch's copies. It is quick but
  // where a batch through the ring is larger than that: then it waits for workers.
  Status stream_wait(uint64_t batch, uint64_t stream, int64_t timeout_ns);
  // kTimeout, the batch's failure, kChanged where checksums did not match, or done. It takes the
  // timeout and one chunk at most.
  Status wait(uint64_t batch, int64_t timeout_ns, Report* report);
  // With a copy of the host state. A worker makes the version.
  Status queue_commit(Bytes host, uint64_t* batch);
  // Chunks that no worker has taken are left out. kTimeout: a worker is still in its chunk; the
  // next begin tries again.
  Status drop(int64_t timeout_ns);
  // Not while a version is in flight: both would take the same free slot.
  Status rebase(uint64_t version);

  Counters counters() const { return draft_.counters(); }

 private:
  Status make_batch(Op op, uint64_t version, std::span<const Span> spans, bool on_device,
                    std::unique_ptr<Batch>* made);
  Status enqueue(std::unique_ptr<Batch> batch, uint64_t* number);
  void withdraw(Batch* batch, Status status);
  void leave_out(bool writes_only);
  void release_commit();
  void stop();

  void work();
  void run(const Turn& turn);
  void run_drain();
  void run_poll();
  void run_piece(const DeviceFeed::Found& found);
  void run_commit(Batch* batch);
  void run_chunks(const Turn& turn);
  void run_arrived(Batch* batch);
  void hear_of_arrivals();
  void complete(Batch* batch);
  void finish(Batch* batch, Status status);

  bool copy_chunk(const Batch& batch, const Chunk& chunk);
  bool copy_staged(Batch* batch, size_t at, std::byte* staged);
  size_t copy_piece(const DeviceFeed::Found& found);
  void fence_after(Op op);

  const std::unique_ptr<Store> store_;
  BatchQueue queue_;
  Draft draft_;
  DeviceFeed devices_;
  std::vector<std::thread> threads_;  // last: started when all else stands
};

}  // namespace lightckpt
