// Engine: worker threads that move extents between memory and one store.
//
// Work comes in batches (a layer to write, a version to read, a commit); a batch is cut into
// chunks, and workers take runs of chunks of at most a MiB from the oldest unfinished batch. So
// batches start in order, all cores work on one, and a wait for the first is not held up by the
// last.
//
//   begin -> submit(write)... -> wait(copied) -> commit -> wait(durable)     or drop at any point
//
// Bounded: at most kBatchesMax batches are unfinished at once, one attempt is in flight. Finished
// batches leave their report in a ring, so that any number of threads may wait for one. The first
// media failure sticks: every later write and commit returns it.
//
// A batch's source memory must not change until it is done. The engine cannot know; its callers
// compare version counters, or checksums through the check operation.
//
// A batch may be of memory on a GPU (submit_on): then pieces of it arrive when the device has
// copied them, and workers take those. One idle worker at a time asks the devices whether there is
// one; no other thread does. The guard of such a batch lets a stream wait, not a thread
// (stream_wait). So a commit may be queued before the last piece has arrived: it waits for the
// batches of its attempt, and is refused where a check among them found other bytes.
//
// Who waits for a batch does its share of it, rather than wait for a worker to get a core: guards
// and boundaries do, in every step, while the trainer's own threads may still spin. Commits are
// left to workers, and so is all but a check, which touches no media, where that is a disk: a
// thread that hangs there could not give up at its deadline.
//
// Threads: submit, wait and stat from any; begin, commit, drop from one at a time. Workers block
// all signals but those that a fault in them raises.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "gpu.h"
#include "store.h"

namespace lightckpt {

uint64_t now_ns();  // CLOCK_MONOTONIC

enum class Op : uint32_t { kWrite = 0, kRead, kCheck, kVerify, kCopy, kCommit };

struct Span {
  std::byte* memory;
  uint32_t extent;
  uint32_t reserved;
};

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

struct Report {
  uint64_t bytes = 0;
  uint64_t submit_ns = 0;
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint32_t bad_count = 0;
  std::array<uint32_t, 15> bad{};
};

class Engine {
 public:
  static constexpr size_t kBatchesMax = 1 << 13;
  static constexpr size_t kReports = kBatchesMax;  // also how far batches overtake one another

  Engine(std::unique_ptr<Store> store, uint32_t workers);
  ~Engine();

  Store& store() { return *store_; }
  uint32_t workers() const { return static_cast<uint32_t>(threads_.size()); }

  Status begin(uint64_t step, uint32_t keep, std::vector<uint64_t> extents, Bytes blob,
               uint64_t host_bytes);
  // `version` 0 is the attempt in flight; kWrite takes no other, kRead, kVerify, kCopy only others.
  Status submit(Op op, uint64_t version, std::span<const Span> spans, uint64_t* batch);
  // Makes a GPU ready, and tries whether its copy engines reach the media; later calls only say so
  // again. The driver is kept. One at a time.
  Status open_device(const CudaDriver& driver, int ordinal, uint64_t ring_bytes, DeviceInfo* info);
  // The same for memory on a device that is open. Not kVerify.
  Status submit_on(const OnDevice& on, Op op, uint64_t version, std::span<const Span> spans,
                   uint64_t* batch);
  // The guard: what `stream` is given from now on comes after the batch's copies. It is quick but
  // where a batch through the ring is larger than that: then it waits for workers.
  Status stream_wait(uint64_t batch, uint64_t stream, int64_t timeout_ns);
  // kTimeout, the batch's failure, kChanged where checksums did not match, or done.
  Status wait(uint64_t batch, int64_t timeout_ns, Report* report);
  Status commit(Bytes host, uint64_t* batch);
  // Chunks that no worker has taken are left out. kTimeout: a worker is still in its chunk; the
  // next begin tries again.
  Status drop(int64_t timeout_ns);
  // Not while an attempt is in flight: both would take the same free slot.
  Status rebase(uint64_t version);

  struct Counters {
    uint64_t commits = 0;
    uint64_t drops = 0;
    uint64_t bytes_persisted = 0;
    uint64_t commit_ns = 0;
  };
  Counters counters() const;

 private:
  // A piece of an extent: what one checksum covers.
  struct Chunk {
    std::byte* memory;
    uint64_t offset;  // on the media
    uint32_t bytes;
    uint32_t extent;
    uint64_t index;  // in the checksum table
  };
  struct Batch {
    uint64_t number = 0;
    Op op = Op::kWrite;
    std::vector<Chunk> chunks;
    size_t next = 0;       // first chunk that no worker has taken
    size_t remaining = 0;  // chunks not finished
    const uint32_t* table = nullptr;
    std::vector<std::byte> host;  // kCommit
    Report report;
    Status status;
    Gpu* gpu = nullptr;
    Moved moved;                 // on that
    std::vector<size_t> firsts;  // of each span, the first chunk
    std::vector<uint32_t> sums;  // kCheck: of each chunk, as it arrived
    bool in_place = false;
    bool arrived = false;

    bool taken() const { return next == (op == Op::kCommit ? 1 : chunks.size()); }
  };
  struct Finished {
    uint64_t number = 0;
    Report report;
    Status status;
  };

  Status make_batch(Op op, uint64_t version, std::span<const Span> spans,
                    std::unique_ptr<Batch>* batch);
  Status enqueue(std::unique_ptr<Batch> batch, uint64_t* number);
  Status enqueue_on(Gpu* gpu, const OnDevice& on, std::unique_ptr<Batch> batch, uint64_t* number);
  Status number_it(Batch* batch, uint64_t* number);
  Gpu* find_gpu(int ordinal);
  Status cover_media();
  Status cut(const Layout& layout, uint64_t area, std::span<const Span> spans, Batch* batch);
  void stop();
  void work();
  void run_some(Batch* batch, std::unique_lock<std::mutex>& lock);
  void help(uint64_t number, uint64_t deadline_ns, std::unique_lock<std::mutex>& lock);
  void run_chunks(Batch* batch, size_t begin, size_t end);
  bool run_chunk(const Batch& batch, const Chunk& chunk);
  void run_commit(Batch* batch);
  Status commit_attempt(std::span<const std::byte> host);
  void poll(std::unique_lock<std::mutex>& lock);
  void run_piece(Gpu* gpu, const Piece& piece, std::unique_lock<std::mutex>& lock);
  uint32_t run_parts(Batch* batch, const Piece& piece, std::vector<uint32_t>* bad);
  bool run_staged(Batch* batch, size_t at, std::byte* staged);
  void judge(const Batch& batch);
  bool awaits_writes(const Batch& check) const;
  void finish_arrived();
  void collect_finished(Gpu* gpu);
  Batch* find_moved(const Gpu* gpu, uint64_t moved);
  bool awaits_device() const;
  void note_written(const Batch& batch, size_t begin, size_t end, uint64_t bytes);
  void note_bad(Batch* batch, uint32_t extent);
  void finish(Batch* batch);
  std::unique_ptr<Batch> new_batch();
  void leave_out(bool writes_only);
  bool attempt_busy() const;
  void close_dropped();

  std::unique_ptr<Store> store_;

  mutable std::mutex mutex_;                  // guards everything below
  std::condition_variable has_work_;          // for workers
  std::condition_variable has_done_;          // for waiters
  std::deque<std::unique_ptr<Batch>> queue_;  // unfinished, oldest first
  std::vector<std::unique_ptr<Batch>>
      spare_;  // keep their capacity: steady state allocates nothing
  std::vector<Finished> finished_;
  uint64_t next_number_ = 1;
  bool stopping_ = false;
  bool drain_early_ = false;  // a plain file has been written, and nobody drains it yet
  Status failed_;
  Counters counters_;

  bool attempt_open_ = false;
  bool dropping_ = false;
  Status verdict_;           // why the attempt may not become a version, though it goes on
  bool committing_ = false;  // queued: the attempt takes no more writes, and no second commit
  Attempt attempt_;
  std::vector<uint32_t> table_;  // of the attempt: workers fill distinct elements
  std::vector<bool> written_;    // which chunks of the attempt have been
  uint64_t chunks_written_ = 0;  // how many

  std::vector<std::unique_ptr<Gpu>> gpus_;  // those that are open, until the end
  size_t on_devices_ = 0;                   // unfinished batches
  bool polling_ = false;                    // a worker asks the devices
  std::chrono::microseconds pause_{0};      // how long it waits where there was nothing

  std::vector<std::thread> threads_;  // last: started when all else stands
};

}  // namespace lightckpt
