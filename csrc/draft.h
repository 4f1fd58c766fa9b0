// Draft: the version in flight, as the engine keeps it: how far its life is, its record, which
// chunks have been written, and why it may not become a version although it goes on.
//
// One state, and what each event makes of it; "-" is refused:
//
//             begin   write   check   commit  take back  drop      rebase   concluded  left
//   none      open    -       -       -       -          -         none     -          none
//   open      -       open    open    queued  -          dropping  -        -          open
//   dropping  -       -       -       -       -          dropping  dropping -          none
//   queued    -       -       queued  -       open       ending    -        none       queued
//   ending    -       -       -       -       -          ending    -        none       ending
//
//   commit      it is queued: from now on no more writes, and no second commit
//   take back   it found no room in the queue
//   concluded   a worker has made it a version, or could not
//   left        no batch is in it any more; begin, drop and rebase look for that first
//
// Once the media is lost, begin, write and commit say so in every state.
//
// Invariants:
//  1. Batches that are of the draft are in it from `join` to `leave`. While one is, no other draft
//     begins: workers write into its area and its record.
//  2. A commit runs when no write is in it, nothing from a device, and no drain is under way: so
//     nobody changes what is committed, and each check that a device makes, and each page that does
//     not reach the disk, is heard of.
//  3. A draft is committed only when each chunk was written and no verdict is against it.
//  4. After `open` nothing is allocated but for messages; where these find no memory, a short one
//     takes their place.
//
// Threads: any; begin, commit and drop from one at a time. The mutex is taken with no other held,
// and no other under it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "batch.h"
#include "deadline.h"
#include "store.h"
#include "thread_annotations.h"

namespace lightckpt {

class Draft {
 public:
  struct Counters {
    uint64_t commits = 0;
    uint64_t drops = 0;
    uint64_t bytes_persisted = 0;
    uint64_t commit_ns = 0;
  };

  // May one begin? Ends one that was dropped, if all have left it.
  Status may_begin();
  // After a begin of the store, which has made room for it.
  void open(Attempt attempt);
  // May an older version be made the latest?
  Status may_rebase();

  // Cuts a write or a check of the version in flight, and lets it in. It leaves when it is through.
  Status join(std::span<const Span> spans, Batch* batch);
  void note_written(const Batch& batch, size_t begin, size_t end, uint64_t bytes);
  // With how it went, which may be a verdict.
  void leave(const Batch& batch, const Status& status, uint32_t bad_count);
  // A verdict from elsewhere: what its workers met.
  void fail(const Status& status);
  // A drain ahead of the commit, which waits for it: pages that it could not bring to the disk are
  // no next drain's. `await_drain` when it is asked for, `drained` when it is over or was not
  // needed.
  void await_drain();
  void drained(const Status& status);
  // Keeps it if it is of a media that is lost.
  void note_lost(const Status& status);

  Status queue_commit();
  void take_back_commit();
  // Has it been queued, and has all left that it waits for?
  bool commit_may_run() const;
  // For the worker that commits: is it whole, then makes it a version.
  Status commit(Store* store, Bytes host);
  void conclude(const Status& status, uint64_t host_bytes, uint64_t ns);

  // Takes no more. Then what is queued is left out, and this waits until all have left.
  Status drop();
  Status wait_left(const Deadline& deadline);

  // The checksum of a chunk; its worker alone may fill it in.
  uint32_t& checksum(uint64_t index) { return front_.table()[index]; }

  Counters counters() const;

 private:
  enum class State { kNone, kOpen, kDropping, kQueued, kEnding };
  enum class Event {
    kBegin,
    kWrite,
    kCheck,
    kCommit,
    kTakeBack,
    kDrop,
    kRebase,
    kConcluded,
    kLeft,
  };
  static bool next(State* state, Event event);
  Status move(Event event) REQUIRES(mutex_);
  Status refusal(Event event) const REQUIRES(mutex_);
  void look_whether_left() REQUIRES(mutex_);
  void keep_lost(const Status& status) REQUIRES(mutex_);
  void judge(const Batch& batch, const Status& status, uint32_t bad_count) REQUIRES(mutex_);

  // Changed by `open` alone, when nobody is in it (1); the table is filled as `checksum` says.
  Attempt attempt_;
  RecordFront front_;

  mutable Mutex mutex_;
  CondVar has_left_;
  State state_ GUARDED_BY(mutex_) = State::kNone;
  Status lost_ GUARDED_BY(mutex_);
  Status verdict_ GUARDED_BY(mutex_);      // why it may not become a version
  size_t inside_ GUARDED_BY(mutex_) = 0;   // batches
  size_t awaited_ GUARDED_BY(mutex_) = 0;  // what a commit waits for (2)
  // Of each chunk: has it been written? Is it, or shall it be by a batch that is on its way?
  std::vector<bool> written_ GUARDED_BY(mutex_);
  std::vector<bool> promised_ GUARDED_BY(mutex_);
  uint64_t written_count_ GUARDED_BY(mutex_) = 0;
  uint64_t promised_count_ GUARDED_BY(mutex_) = 0;
  Counters counters_ GUARDED_BY(mutex_);
};

}  // namespace lightckpt
