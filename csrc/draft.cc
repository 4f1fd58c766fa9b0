// The states, and what is noted of a version in flight. See draft.h.
#include "draft.h"

#include <exception>
#include <utility>

namespace lightckpt {
namespace {

// Keeps a status whose message takes memory, or its code where there is none.
void keep(Status* kept, Code code, const char* what, const Status& status) {
  try {
    *kept = {code, what + status.message()};
  } catch (const std::exception&) {
    *kept = {code, no_host_memory().message()};
  }
}

}  // namespace

// The table in draft.h.
bool Draft::next(State* state, Event event) {
  using enum State;
  struct Cell {
    State next = kNone;
    bool allowed = false;
    constexpr Cell() = default;
    constexpr Cell(State to) : next(to), allowed(true) {}
  };
  constexpr Cell no;
  static constexpr Cell kTable[5][9] = {
      {kOpen, no, no, no, no, no, kNone, no, kNone},
      {no, kOpen, kOpen, kQueued, no, kDropping, no, no, kOpen},
      {no, no, no, no, no, kDropping, kDropping, no, kNone},
      {no, no, kQueued, no, kOpen, kEnding, no, kNone, kQueued},
      {no, no, no, no, no, kEnding, no, kNone, kEnding},
  };
  const Cell& cell = kTable[static_cast<size_t>(*state)][static_cast<size_t>(event)];
  if (cell.allowed) *state = cell.next;
  return cell.allowed;
}

Status Draft::move(Event event) { return next(&state_, event) ? Status() : refusal(event); }

Status Draft::refusal(Event event) const {
  if (event == Event::kBegin || event == Event::kRebase) {
    return {Code::kInvalid, "a version of step " + std::to_string(attempt_.slot.step) +
                                " is in flight: commit or drop it first"};
  }
  if (state_ == State::kQueued && event == Event::kWrite) {
    return {Code::kInvalid, "the version's commit is queued: it takes no more writes"};
  }
  if (state_ == State::kQueued && event == Event::kCommit) {
    return {Code::kInvalid, "the version's commit is queued already"};
  }
  return {Code::kInvalid, "no version is in flight"};
}

void Draft::look_whether_left() {
  if (inside_ > 0) return;
  const State before = state_;
  CHECK(next(&state_, Event::kLeft));
  if (before == State::kDropping) ++counters_.drops;
}

Status Draft::may_begin() {
  MutexLock lock(mutex_);
  if (!lost_.ok()) return lost_;
  look_whether_left();
  State then = state_;
  if (!next(&then, Event::kBegin)) return refusal(Event::kBegin);
  if (inside_ > 0) {
    return {Code::kInvalid, "a check of the version before is not done: wait for it first"};
  }
  return {};
}

void Draft::open(Attempt attempt) {
  MutexLock lock(mutex_);
  const uint64_t chunks = attempt.layout->chunk_count;
  front_.reset(chunks);
  written_.assign(chunks, false);
  promised_.assign(chunks, false);
  written_count_ = promised_count_ = 0;
  verdict_ = {};
  attempt_ = std::move(attempt);
  CHECK(move(Event::kBegin).ok() && inside_ == 0);
}

Status Draft::may_rebase() {
  MutexLock lock(mutex_);
  look_whether_left();
  return move(Event::kRebase);
}

Status Draft::join(std::span<const Span> spans, Batch* batch) {
  MutexLock lock(mutex_);
  const bool write = batch->op == Op::kWrite;
  if (write && !lost_.ok()) return lost_;
  RETURN_IF_ERROR(move(write ? Event::kWrite : Event::kCheck));
  RETURN_IF_ERROR(batch->cut(*attempt_.layout, attempt_.slot.record_offset, spans));
  batch->table = front_.table();
  batch->of_draft = true;
  ++inside_;
  if (write || batch->on_device) ++awaited_;
  if (!write || !batch->on_device) return {};
  for (const Chunk& chunk : batch->chunks) {
    promised_count_ += promised_[chunk.index] ? 0 : 1;
    promised_[chunk.index] = true;
  }
  return {};
}

// Counted once each: a chunk that was written twice does not stand in for another.
void Draft::note_written(const Batch& batch, size_t begin, size_t end, uint64_t bytes) {
  MutexLock lock(mutex_);
  for (size_t i = begin; i < end; ++i) {
    const uint64_t index = batch.chunks[i].index;
    written_count_ += written_[index] ? 0 : 1;
    promised_count_ += promised_[index] ? 0 : 1;
    written_[index] = promised_[index] = true;
  }
  counters_.bytes_persisted += bytes;
}

void Draft::leave(const Batch& batch, const Status& status, uint32_t bad_count) {
  MutexLock lock(mutex_);
  keep_lost(status);
  if (!batch.of_draft) return;
  judge(batch, status, bad_count);
  // What was to come from the device may not have come.
  const bool promised = batch.on_device && batch.op == Op::kWrite;
  for (size_t i = 0; promised && i < batch.chunks.size(); ++i) {
    const uint64_t index = batch.chunks[i].index;
    if (written_[index] || !promised_[index]) continue;
    promised_[index] = false;
    --promised_count_;
  }
  --inside_;
  if (batch.op == Op::kWrite || batch.on_device) --awaited_;
  has_left_.notify_all();
}

// Who writes in host memory waits for it and hears of a check; who commits what comes from a device
// has not waited for that, nor looked at it.
void Draft::judge(const Batch& batch, const Status& status, uint32_t bad_count) {
  const bool check = batch.op == Op::kCheck;
  if (!status.ok() && (batch.on_device || !check)) {
    const char* what = "";
    if (batch.on_device && status.code() != Code::kLost) {
      what = check ? "what was copied could not be checked: " : "a copy from a device failed: ";
    }
    if (!verdict_.ok() && verdict_.code() != Code::kChanged) return;
    keep(&verdict_, batch.on_device && *what != '\0' ? Code::kIo : status.code(), what, status);
  } else if (batch.on_device && bad_count > 0 && verdict_.ok()) {
    const Status changed(Code::kChanged, "");
    keep(&verdict_, Code::kChanged,
         "what was copied differs from its checksums: the version is dropped", changed);
  }
}

void Draft::fail(const Status& status) {
  MutexLock lock(mutex_);
  keep_lost(status);
  if (state_ != State::kNone && verdict_.ok()) keep(&verdict_, status.code(), "", status);
}

void Draft::await_drain() {
  MutexLock lock(mutex_);
  ++awaited_;
}

void Draft::drained(const Status& status) {
  if (!status.ok()) fail(status);
  MutexLock lock(mutex_);
  --awaited_;
}

void Draft::note_lost(const Status& status) {
  MutexLock lock(mutex_);
  keep_lost(status);
}

void Draft::keep_lost(const Status& status) {
  if (status.code() == Code::kLost && lost_.ok()) keep(&lost_, Code::kLost, "", status);
}

Status Draft::queue_commit() {
  MutexLock lock(mutex_);
  if (!lost_.ok()) return lost_;
  State then = state_;
  if (!next(&then, Event::kCommit)) return refusal(Event::kCommit);
  if (promised_count_ < promised_.size()) {
    if (!verdict_.ok()) return verdict_;
    return {Code::kInvalid, std::to_string(promised_count_) + " of " +
                                std::to_string(promised_.size()) +
                                " chunks have been written, or are on their way"};
  }
  return move(Event::kCommit);
}

void Draft::take_back_commit() {
  MutexLock lock(mutex_);
  CHECK(move(Event::kTakeBack).ok());
}

bool Draft::commit_may_run() const {
  MutexLock lock(mutex_);
  return (state_ == State::kQueued || state_ == State::kEnding) && awaited_ == 0;
}

Status Draft::commit(Store* store, Bytes host) {
  {
    MutexLock lock(mutex_);
    if (!lost_.ok()) return lost_;
    if (!verdict_.ok()) return verdict_;
    if (written_count_ != written_.size()) {
      return {Code::kIo, std::to_string(written_.size() - written_count_) + " of " +
                             std::to_string(written_.size()) +
                             " chunks did not come from the device: the version is dropped"};
    }
  }
  return store->commit(attempt_, std::move(front_), host);
}

void Draft::conclude(const Status& status, uint64_t host_bytes, uint64_t ns) {
  MutexLock lock(mutex_);
  keep_lost(status);
  CHECK(move(Event::kConcluded).ok());
  has_left_.notify_all();
  if (!status.ok()) {
    ++counters_.drops;
    return;
  }
  ++counters_.commits;
  counters_.bytes_persisted += host_bytes;
  counters_.commit_ns = ns;
}

Status Draft::drop() {
  MutexLock lock(mutex_);
  return move(Event::kDrop);
}

Status Draft::wait_left(const Deadline& deadline) {
  MutexLock lock(mutex_);
  while (true) {
    look_whether_left();
    if (state_ == State::kNone && inside_ == 0) return {};
    if (deadline.passed()) {
      return {Code::kTimeout, "the workers have not left the version " + deadline.after()};
    }
    has_left_.wait_for(lock, deadline.left());
  }
}

Draft::Counters Draft::counters() const {
  MutexLock lock(mutex_);
  return counters_;
}

}  // namespace lightckpt
