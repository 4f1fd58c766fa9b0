// BatchQueue: the unfinished batches in order, and the turns of those who work on them.
//
//   push -> [next | help -> done] for all its chunks -> finish -> wait      a batch in host memory
//   push -> [started, note_bytes] for each piece -> arrive -> next -> finish   one on a device
//
// Workers take runs of chunks of at most a MiB from the oldest unfinished batch. So batches start
// in order, all cores work on one, and a wait for the first is not held up by the last. What else
// there is to do has its turn here as well: draining early, and asking the devices, which one idle
// worker at a time does.
//
// Invariants:
//  1. At most kBatchesMax batches are unfinished, counted from the oldest number: so each finds its
//     own entry in the ring of reports, and any number of threads may wait for one.
//  2. Exactly one caller is told that a batch is through (done, give_up, next), and finishes it.
//  3. What workers call allocates nothing.
//
// Threads: any. The mutex is taken with no other held, and no other under it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "batch.h"
#include "deadline.h"
#include "status.h"
#include "thread_annotations.h"

namespace lightckpt {

// What a worker does next.
struct Turn {
  enum class Kind {
    kEnd,
    kDrain,    // a plain file has been written, and nobody drains it yet
    kPoll,     // ask the devices; ends with `polled`
    kCommit,   // of `batch`
    kChunks,   // [begin, end) of `batch`
    kArrived,  // `batch` has come from a device, or is there: compare and finish it
  };
  Kind kind = Kind::kEnd;
  Batch* batch = nullptr;
  size_t begin = 0;
  size_t end = 0;
  uint64_t bytes = 0;  // of the chunks
};

class BatchQueue {
 public:
  static constexpr size_t kBatchesMax = 1 << 13;
  static constexpr size_t kReports = kBatchesMax;  // also how far batches overtake one another

  // `help_on_media`: may a thread that waits for a batch do a part of it that touches the media?
  explicit BatchQueue(bool help_on_media);

  // For who submits. A batch that is empty, with the memory of a finished one.
  std::unique_ptr<Batch> spare();
  // kInvalid: too many are unfinished; it stays the caller's.
  Status push(std::unique_ptr<Batch>* batch, uint64_t* number);
  // A commit is queued held; this lets it run.
  void release_commit();
  // It has had its turn too early, and is held again.
  void hold_commit(Batch* batch);

  // For who waits. A part of the batch, if there is one that may be done by others than workers; a
  // small one, so that its caller can look at its deadline.
  bool help(uint64_t number, Turn* turn);
  // kTimeout (the report says how far it is), the batch's failure, kChanged, or done.
  Status wait(uint64_t number, const Deadline& deadline, Report* report);
  // The failure of a batch that has finished lately; kNotFound if it was never submitted.
  Status failure_of(uint64_t number) const;

  // For workers. Waits until there is something.
  Turn next();
  void polled(bool found);
  // True: that was the last of the batch. The first failure is the batch's.
  bool done(const Turn& turn, Status status);
  void started(Batch* batch);  // or one of its pieces
  void note_bytes(Batch* batch, uint64_t bytes);
  void note_bad(Batch* batch, uint32_t extent);
  // Of one on a device: nothing is under way any more.
  void arrive(Batch* batch, Status status, bool in_place);
  bool has_failed(const Batch& batch) const;
  // How it has gone.
  Status outcome(const Batch& batch, uint32_t* bad_count) const;
  void finish(Batch* batch, Status status);
  // False: that was asked for already, and nobody has begun it.
  bool ask_to_drain();

  // For who gives up. Leaves out the chunks in host memory that nobody has taken, of writes or of
  // all but commits. Returns a batch that is through by that; call it until there is none.
  Batch* give_up(bool writes_only);
  // Turns end when no batch is left that could be done.
  void stop();

 private:
  struct Finished {
    uint64_t number = 0;
    Report report;
    Status status;
  };

  Batch* find(uint64_t number) const REQUIRES(mutex_);
  Batch* takeable() const REQUIRES(mutex_);
  bool may_take(const Batch& batch) const REQUIRES(mutex_);
  bool awaits_writes(const Batch& check) const REQUIRES(mutex_);
  Turn take(Batch* batch, uint64_t bytes_max) REQUIRES(mutex_);

  const bool help_on_media_;

  mutable Mutex mutex_;
  CondVar has_work_;                                              // for workers
  CondVar has_done_;                                              // for waiters
  std::vector<std::unique_ptr<Batch>> queue_ GUARDED_BY(mutex_);  // oldest first
  std::vector<std::unique_ptr<Batch>> spare_ GUARDED_BY(mutex_);  // has room for all there are
  std::vector<Finished> finished_ GUARDED_BY(mutex_);             // by number, modulo its size
  size_t made_ GUARDED_BY(mutex_) = 0;
  uint64_t next_number_ GUARDED_BY(mutex_) = 1;
  size_t on_devices_ GUARDED_BY(mutex_) = 0;               // unfinished batches
  bool polling_ GUARDED_BY(mutex_) = false;                // a worker asks the devices
  std::chrono::microseconds pause_ GUARDED_BY(mutex_){0};  // how long it waits after finding none
  bool drain_early_ GUARDED_BY(mutex_) = false;
  bool stopping_ GUARDED_BY(mutex_) = false;
};

}  // namespace lightckpt
