// Turns, reports and waiting. See batch_queue.h.
#include "batch_queue.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace lightckpt {
namespace {

constexpr uint64_t kWorkerBytes = kChunkBytes;
// One chunk if it is larger. Small ones take microseconds together, and one turn at the mutex.
constexpr uint64_t kHelperBytes = 64 << 10;

// How long the worker that asks the devices waits before it asks again.
constexpr std::chrono::microseconds kPauseMin{20};
constexpr std::chrono::microseconds kPauseMax{500};

// The end of an engine says it too, where no exception may come out.
Status given_up() {
  try {
    return {Code::kInvalid, "the version was given up"};
  } catch (const std::exception&) {
    return {Code::kInvalid, "given up"};
  }
}

}  // namespace

BatchQueue::BatchQueue(bool help_on_media) : help_on_media_(help_on_media), finished_(kReports) {
  queue_.reserve(kBatchesMax);
}

std::unique_ptr<Batch> BatchQueue::spare() {
  MutexLock lock(mutex_);
  if (spare_.empty()) {
    spare_.reserve(made_ + 1);
    auto batch = std::make_unique<Batch>();
    ++made_;
    return batch;
  }
  std::unique_ptr<Batch> batch = std::move(spare_.back());
  spare_.pop_back();
  return batch;
}

Status BatchQueue::push(std::unique_ptr<Batch>* pushed, uint64_t* number) {
  MutexLock lock(mutex_);
  if (!queue_.empty() && next_number_ - queue_.front()->number >= kBatchesMax) {
    return {Code::kInvalid,
            "more than " + std::to_string(kBatchesMax) + " batches are unfinished: wait for some"};
  }
  Batch& batch = **pushed;
  batch.number = *number = next_number_++;
  batch.report_.submit_ns = now_ns();
  batch.held_ = batch.op == Op::kCommit;
  // Chunks on a device are none for workers, but as pieces.
  batch.next_ = batch.on_device ? batch.chunks.size() : 0;
  batch.remaining_ = batch.chunks.size();
  queue_.push_back(std::move(*pushed));
  if (batch.on_device) {
    ++on_devices_;
    pause_ = kPauseMin;
  }
  if (batch.on_device || batch.remaining_ == 1) {
    has_work_.notify_one();
  } else if (batch.remaining_ > 1) {
    has_work_.notify_all();
  }
  return {};
}

void BatchQueue::release_commit() {
  MutexLock lock(mutex_);
  for (const auto& batch : queue_) batch->held_ = false;
  has_work_.notify_one();
}

void BatchQueue::hold_commit(Batch* batch) {
  MutexLock lock(mutex_);
  batch->held_ = true;
  batch->report_.start_ns = 0;
}

Batch* BatchQueue::find(uint64_t number) const {
  const auto found = std::ranges::lower_bound(
      queue_, number, {}, [](const std::unique_ptr<Batch>& batch) { return batch->number; });
  return found != queue_.end() && (*found)->number == number ? found->get() : nullptr;
}

bool BatchQueue::help(uint64_t number, Turn* turn) {
  MutexLock lock(mutex_);
  Batch* const batch = find(number);
  if (batch == nullptr || batch->next_ == batch->chunks.size()) return false;
  if (batch->op != Op::kCheck && !help_on_media_) return false;
  *turn = take(batch, kHelperBytes);
  return true;
}

Status BatchQueue::wait(uint64_t number, const Deadline& deadline, Report* report) {
  MutexLock lock(mutex_);
  if (number == 0 || number >= next_number_) {
    return {Code::kNotFound, "batch " + std::to_string(number) + " was never submitted"};
  }
  const Finished& entry = finished_[number % kReports];
  while (entry.number < number) {
    if (deadline.passed()) {
      if (const Batch* const batch = find(number)) *report = batch->report_;
      return {Code::kTimeout, "not done " + deadline.after() + ": " +
                                  std::to_string(report->bytes) + " bytes were"};
    }
    has_done_.wait_for(lock, deadline.left());
  }
  if (entry.number > number) {
    return {Code::kNotFound, "batch " + std::to_string(number) + " was done long ago"};
  }
  *report = entry.report;
  if (!entry.status.ok()) return entry.status;
  if (report->bad_count > 0) {
    return {Code::kChanged, std::to_string(report->bad_count) +
                                " chunks differ from their checksums, the first in extent " +
                                std::to_string(report->bad[0])};
  }
  return {};
}

Status BatchQueue::failure_of(uint64_t number) const {
  MutexLock lock(mutex_);
  if (number == 0 || number >= next_number_) {
    return {Code::kNotFound, "batch " + std::to_string(number) + " was never submitted"};
  }
  const Finished& entry = finished_[number % kReports];
  return entry.number == number ? entry.status : Status();
}

Turn BatchQueue::next() {
  MutexLock lock(mutex_);
  while (true) {
    if (std::exchange(drain_early_, false)) return {Turn::Kind::kDrain};
    if (Batch* const batch = takeable()) {
      // Whoever asks the devices may be this one.
      if (on_devices_ > 0 && !polling_) has_work_.notify_one();
      return take(batch, kWorkerBytes);
    }
    if (on_devices_ > 0 && !polling_) {
      polling_ = true;
      return {Turn::Kind::kPoll};
    }
    if (stopping_ && on_devices_ == 0) return {Turn::Kind::kEnd};
    has_work_.wait(lock);
  }
}

// In their turn: a commit goes alone, but chunks of batches before it may still be running.
Batch* BatchQueue::takeable() const {
  for (const auto& batch : queue_) {
    if (may_take(*batch)) return batch.get();
  }
  return nullptr;
}

bool BatchQueue::may_take(const Batch& batch) const {
  if (batch.op == Op::kCommit) return !batch.held_ && batch.report_.start_ns == 0;
  if (batch.on_device) return batch.arrived_ && !awaits_writes(batch);
  return batch.next_ < batch.chunks.size();
}

// A check of the version in flight comes after the writes that it is of.
bool BatchQueue::awaits_writes(const Batch& check) const {
  if (check.op != Op::kCheck || !check.of_draft) return false;
  for (const auto& batch : queue_) {
    if (batch->number >= check.number) return false;
    if (batch->op == Op::kWrite && batch->of_draft) return true;
  }
  return false;
}

Turn BatchQueue::take(Batch* batch, uint64_t bytes_max) {
  if (batch->report_.start_ns == 0) batch->report_.start_ns = now_ns();
  if (batch->op == Op::kCommit) return {Turn::Kind::kCommit, batch};
  if (batch->on_device) {
    batch->arrived_ = false;
    return {Turn::Kind::kArrived, batch};
  }
  Turn turn = {Turn::Kind::kChunks, batch, batch->next_};
  do {
    turn.bytes += batch->chunks[batch->next_++].bytes;
  } while (batch->next_ < batch->chunks.size() &&
           turn.bytes + batch->chunks[batch->next_].bytes <= bytes_max);
  turn.end = batch->next_;
  return turn;
}

// Waits for a while where there was nothing, and something else comes first.
void BatchQueue::polled(bool found) {
  MutexLock lock(mutex_);
  if (!found && on_devices_ > 0 && !drain_early_ && takeable() == nullptr) {
    has_work_.wait_for(lock, pause_);
    pause_ = std::min(pause_ * 2, kPauseMax);
  }
  polling_ = false;
  if (!found) return;
  pause_ = kPauseMin;
  has_work_.notify_one();  // to ask on
}

bool BatchQueue::done(const Turn& turn, Status status) {
  MutexLock lock(mutex_);
  Batch* const batch = turn.batch;
  batch->report_.bytes += turn.bytes;
  if (batch->status_.ok()) batch->status_ = std::move(status);
  batch->remaining_ -= turn.end - turn.begin;
  return batch->remaining_ == 0;
}

void BatchQueue::started(Batch* batch) {
  MutexLock lock(mutex_);
  if (batch->report_.start_ns == 0) batch->report_.start_ns = now_ns();
}

void BatchQueue::note_bytes(Batch* batch, uint64_t bytes) {
  MutexLock lock(mutex_);
  batch->report_.bytes += bytes;
}

void BatchQueue::note_bad(Batch* batch, uint32_t extent) {
  MutexLock lock(mutex_);
  Report& report = batch->report_;
  if (report.bad_count < report.bad.size()) report.bad[report.bad_count] = extent;
  ++report.bad_count;
}

void BatchQueue::arrive(Batch* batch, Status status, bool in_place) {
  MutexLock lock(mutex_);
  batch->report_.in_place = in_place;
  batch->status_ = std::move(status);
  batch->arrived_ = true;
  has_work_.notify_one();
}

bool BatchQueue::has_failed(const Batch& batch) const {
  MutexLock lock(mutex_);
  return !batch.status_.ok();
}

Status BatchQueue::outcome(const Batch& batch, uint32_t* bad_count) const {
  MutexLock lock(mutex_);
  *bad_count = batch.report_.bad_count;
  return batch.status_;
}

// Moves a batch from the queue to the ring of reports.
void BatchQueue::finish(Batch* batch, Status status) {
  MutexLock lock(mutex_);
  batch->report_.end_ns = now_ns();
  if (batch->report_.start_ns == 0) batch->report_.start_ns = batch->report_.submit_ns;
  finished_[batch->number % kReports] = {batch->number, batch->report_, std::move(status)};
  // A check may have waited for it, or the end.
  if (on_devices_ > 0) has_work_.notify_all();
  if (batch->on_device) --on_devices_;
  const auto found = std::ranges::lower_bound(
      queue_, batch->number, {}, [](const std::unique_ptr<Batch>& one) { return one->number; });
  CHECK(found != queue_.end() && found->get() == batch);
  batch->clear();
  spare_.push_back(std::move(*found));
  queue_.erase(found);
  has_done_.notify_all();
}

bool BatchQueue::ask_to_drain() {
  MutexLock lock(mutex_);
  has_work_.notify_one();
  return !std::exchange(drain_early_, true);
}

Batch* BatchQueue::give_up(bool writes_only) {
  MutexLock lock(mutex_);
  for (size_t i = queue_.size(); i-- > 0;) {
    Batch* const batch = queue_[i].get();
    if (batch->op == Op::kCommit || (writes_only && batch->op != Op::kWrite)) continue;
    if (batch->on_device || batch->remaining_ == 0 || !batch->status_.ok()) continue;
    batch->status_ = given_up();
    batch->remaining_ -= batch->chunks.size() - batch->next_;
    batch->next_ = batch->chunks.size();
    if (batch->remaining_ == 0) return batch;
  }
  return nullptr;
}

void BatchQueue::stop() {
  MutexLock lock(mutex_);
  stopping_ = true;
  has_work_.notify_all();
}

}  // namespace lightckpt
