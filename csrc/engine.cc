// The queue of batches, and waiting for them. See engine.h.
#include "engine.h"

#include <time.h>

#include <algorithm>
#include <chrono>

namespace lightckpt {
namespace {

// 36 years at most: INT64_MAX added to a clock would overflow, and so end at once.
std::chrono::nanoseconds bounded(int64_t timeout_ns) {
  return std::chrono::nanoseconds(std::min(timeout_ns, int64_t{1} << 60));
}

}  // namespace

uint64_t now_ns() {
  struct timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

Engine::Engine(std::unique_ptr<Store> store, uint32_t workers)
    : store_(std::move(store)), finished_(kReports) {
  threads_.reserve(workers);
  try {
    for (uint32_t i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
  } catch (...) {
    stop();  // a thread that is destroyed before it is joined ends the process
    throw;
  }
}

Engine::~Engine() { stop(); }

void Engine::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    // Nobody can wait for them any more, so their memory may be gone. A commit has its own copy.
    leave_out(false);
  }
  has_work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Engine::Counters Engine::counters() const {
  std::lock_guard lock(mutex_);
  return counters_;
}

Status Engine::begin(uint64_t step, uint32_t keep, std::vector<uint64_t> extents, Bytes blob,
                     uint64_t host_bytes) {
  {
    std::lock_guard lock(mutex_);
    if (!failed_.ok()) return failed_;
    if (dropping_ && !attempt_busy()) close_dropped();
    if (attempt_open_) {
      return {Code::kInvalid, "a version of step " + std::to_string(attempt_.slot.step) +
                                  " is in flight: commit or drop it first"};
    }
    const bool checked = std::ranges::any_of(queue_, [&](const auto& batch) {
      return batch->op == Op::kCheck && batch->table == table_.data();
    });
    if (checked) {
      return {Code::kInvalid, "a check of the version before is not done: wait for it first"};
    }
  }
  Attempt attempt;
  Status status = store_->begin(step, keep, std::move(extents), blob, host_bytes, &attempt);
  const bool media_failed = status.code() == Code::kLost;
  if (status.ok()) status = cover_media();
  std::lock_guard lock(mutex_);
  if (media_failed) failed_ = status;
  if (!status.ok()) return status;
  attempt_ = std::move(attempt);
  attempt_open_ = true;
  table_.assign(attempt_.layout->chunk_count, 0);
  written_.assign(attempt_.layout->chunk_count, false);
  chunks_written_ = 0;
  verdict_ = {};
  return {};
}

std::unique_ptr<Engine::Batch> Engine::new_batch() {
  std::lock_guard lock(mutex_);
  if (spare_.empty()) return std::make_unique<Batch>();
  std::unique_ptr<Batch> batch = std::move(spare_.back());
  spare_.pop_back();
  return batch;
}

// Cuts spans into chunks; consecutive extents lie one behind the other, so the media is written
// from front to back.
Status Engine::cut(const Layout& layout, uint64_t area, std::span<const Span> spans, Batch* batch) {
  for (const Span& span : spans) {
    if (span.extent >= layout.extent_bytes.size()) {
      return {Code::kInvalid, "extent " + std::to_string(span.extent) + " of " +
                                  std::to_string(layout.extent_bytes.size())};
    }
    batch->firsts.push_back(batch->chunks.size());
    const uint64_t bytes = layout.extent_bytes[span.extent];
    if (bytes > 0 && span.memory == nullptr && batch->op != Op::kVerify) {
      return {Code::kInvalid, "extent " + std::to_string(span.extent) + " has no memory"};
    }
    uint64_t index = layout.first_chunks[span.extent];
    for (uint64_t done = 0; done < bytes; done += kChunkBytes, ++index) {
      const auto piece = static_cast<uint32_t>(std::min(kChunkBytes, bytes - done));
      batch->chunks.push_back({span.memory == nullptr ? nullptr : span.memory + done,
                               area + layout.extent_offsets[span.extent] + done, piece, span.extent,
                               index});
    }
  }
  return {};
}

Status Engine::submit(Op op, uint64_t version, std::span<const Span> spans, uint64_t* number) {
  std::unique_ptr<Batch> batch;
  RETURN_IF_ERROR(make_batch(op, version, spans, &batch));
  return enqueue(std::move(batch), number);
}

Status Engine::make_batch(Op op, uint64_t version, std::span<const Span> spans,
                          std::unique_ptr<Batch>* made) {
  std::unique_ptr<Batch> batch = new_batch();
  batch->op = op;
  if (version == 0) {
    if (op != Op::kWrite && op != Op::kCheck) {
      return {Code::kInvalid, "the version in flight can be written and checked only"};
    }
    std::lock_guard lock(mutex_);
    if (!failed_.ok() && op == Op::kWrite) return failed_;
    if (!attempt_open_ || dropping_) return {Code::kInvalid, "no version is in flight"};
    if (committing_ && op == Op::kWrite) {
      return {Code::kInvalid, "the version's commit is queued: it takes no more writes"};
    }
    batch->table = table_.data();
    RETURN_IF_ERROR(cut(*attempt_.layout, attempt_.slot.record_offset, spans, batch.get()));
  } else {
    if (op == Op::kWrite || op == Op::kCommit) {
      return {Code::kInvalid, "version " + std::to_string(version) + " is committed: read it only"};
    }
    Version found;
    Bytes host;
    RETURN_IF_ERROR(store_->find(version, &found));
    RETURN_IF_ERROR(
        decode_record(store_->media(), found.slot, *found.layout, &batch->table, &host));
    RETURN_IF_ERROR(cut(*found.layout, found.slot.record_offset, spans, batch.get()));
  }
  *made = std::move(batch);
  return {};
}

// With the mutex held.
Status Engine::number_it(Batch* batch, uint64_t* number) {
  // Counted from the oldest unfinished one: it must still find its own place in the ring.
  if (!queue_.empty() && next_number_ - queue_.front()->number >= kBatchesMax) {
    return {Code::kInvalid, "batch " + std::to_string(queue_.front()->number) +
                                " is unfinished, and " + std::to_string(kBatchesMax) +
                                " have been submitted since"};
  }
  batch->number = *number = next_number_++;
  batch->report = {};
  batch->report.submit_ns = now_ns();
  batch->status = {};
  return {};
}

Status Engine::enqueue(std::unique_ptr<Batch> batch, uint64_t* number) {
  std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(number_it(batch.get(), number));
  batch->next = 0;
  batch->remaining = batch->op == Op::kCommit ? 1 : batch->chunks.size();
  if (batch->remaining == 0) {
    batch->report.start_ns = batch->report.submit_ns;
    finish(batch.get());
    return {};
  }
  if (batch->op == Op::kCommit) committing_ = true;
  const bool alone = batch->remaining == 1;
  queue_.push_back(std::move(batch));
  alone ? has_work_.notify_one() : has_work_.notify_all();
  return {};
}

Status Engine::wait(uint64_t number, int64_t timeout_ns, Report* report) {
  std::unique_lock lock(mutex_);
  if (number == 0 || number >= next_number_) {
    return {Code::kNotFound, "batch " + std::to_string(number) + " was never submitted"};
  }
  const uint64_t deadline_ns =
      timeout_ns < 0 ? UINT64_MAX : now_ns() + uint64_t(bounded(timeout_ns).count());
  Finished& place = finished_[number % kReports];
  const auto is_done = [&] { return place.number >= number; };
  help(number, deadline_ns, lock);
  if (timeout_ns < 0) {
    has_done_.wait(lock, is_done);
  } else if (!has_done_.wait_for(lock, bounded(timeout_ns), is_done)) {
    for (const auto& batch : queue_) {
      if (batch->number == number) *report = batch->report;
    }
    return {Code::kTimeout, "not done after " + std::to_string(timeout_ns / 1'000'000) +
                                " ms: " + std::to_string(report->bytes) + " bytes were"};
  }
  if (place.number > number) {
    return {Code::kNotFound, "batch " + std::to_string(number) + " was done long ago"};
  }
  *report = place.report;
  if (!place.status.ok()) return place.status;
  if (report->bad_count > 0) {
    return {Code::kChanged, std::to_string(report->bad_count) +
                                " chunks differ from their checksums, the first in extent " +
                                std::to_string(report->bad[0])};
  }
  return {};
}

// With the mutex held, which it lets go meanwhile. Who waits has a core, and a worker may have to
// wait for one. Never for a disk: nothing could end that wait in time.
void Engine::help(uint64_t number, uint64_t deadline_ns, std::unique_lock<std::mutex>& lock) {
  const bool on_disk = store_->media().granularity() == Granularity::kPage;
  const auto is_helped = [&](const auto& b) {
    return b->number == number && (b->op == Op::kCheck || (b->op != Op::kCommit && !on_disk));
  };
  while (now_ns() < deadline_ns) {
    const auto found = std::ranges::find_if(queue_, is_helped);
    if (found == queue_.end() || (*found)->taken()) return;
    run_some(found->get(), lock);
  }
}

Status Engine::commit(Bytes host, uint64_t* number) {
  std::unique_ptr<Batch> batch = new_batch();
  {
    std::lock_guard lock(mutex_);
    if (!failed_.ok()) return failed_;
    if (!attempt_open_ || dropping_) return {Code::kInvalid, "no version is in flight"};
    if (committing_) return {Code::kInvalid, "the version's commit is queued already"};
    uint64_t coming = chunks_written_;
    for (const auto& queued : queue_) {
      if (queued->gpu == nullptr || queued->op != Op::kWrite) continue;
      const auto is_new = [&](const Chunk& chunk) { return !written_[chunk.index]; };
      coming += static_cast<uint64_t>(std::ranges::count_if(queued->chunks, is_new));
    }
    if (coming < table_.size()) {
      if (!verdict_.ok()) return verdict_;
      return {Code::kInvalid, std::to_string(coming) + " of " + std::to_string(table_.size()) +
                                  " chunks have been written, or are on their way"};
    }
  }
  batch->op = Op::kCommit;
  batch->host.assign(host.begin(), host.end());
  return enqueue(std::move(batch), number);
}

Status Engine::rebase(uint64_t version) {
  {
    std::lock_guard lock(mutex_);
    if (dropping_ && !attempt_busy()) close_dropped();
    if (attempt_open_ && (!dropping_ || committing_)) {
      return {Code::kInvalid, "a version of step " + std::to_string(attempt_.slot.step) +
                                  " is in flight: commit or drop it first"};
    }
  }
  return store_->rebase(version);
}

// With the mutex held. Takes chunks that no worker has begun out of the queue, never a commit.
void Engine::leave_out(bool writes_only) {
  for (size_t i = queue_.size(); i-- > 0;) {
    Batch* batch = queue_[i].get();
    if (batch->op == Op::kCommit || (writes_only && batch->op != Op::kWrite)) continue;
    if (batch->gpu != nullptr) {
      batch->gpu->mover().cancel(batch->moved.batch, {Code::kInvalid, "the version was given up"});
      continue;
    }
    batch->remaining -= batch->chunks.size() - batch->next;
    batch->next = batch->chunks.size();
    batch->status = {Code::kInvalid, "the version was given up"};
    if (batch->remaining == 0) finish(batch);
  }
  if (on_devices_ > 0) finish_arrived();
}

Status Engine::drop(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  if (!attempt_open_) return {Code::kInvalid, "no version is in flight"};
  dropping_ = true;
  leave_out(true);
  // Workers write into the attempt's area: it is free only when they have left it.
  const auto left = [&] { return !attempt_busy(); };
  if (!has_done_.wait_for(lock, bounded(timeout_ns), left)) {
    return {Code::kTimeout, "the workers have not left the version after " +
                                std::to_string(timeout_ns / 1'000'000) + " ms"};
  }
  close_dropped();
  return {};
}

bool Engine::attempt_busy() const {
  return std::ranges::any_of(queue_, [](const auto& batch) {
    return batch->op == Op::kWrite || batch->op == Op::kCommit || batch->op == Op::kCheck;
  });
}

void Engine::close_dropped() {
  if (attempt_open_) ++counters_.drops;
  attempt_open_ = dropping_ = committing_ = false;
}

// With the mutex held. Moves a batch from the queue to the finished ring.
void Engine::finish(Batch* batch) {
  batch->report.end_ns = now_ns();
  if (batch->status.ok() && batch->op != Op::kCommit && batch->op != Op::kCheck) {
    batch->status = store_->media().check();
    if (batch->status.code() == Code::kLost && failed_.ok()) failed_ = batch->status;
  }
  if (batch->gpu != nullptr) --on_devices_;
  Finished& place = finished_[batch->number % kReports];
  place.number = batch->number;
  place.report = batch->report;
  place.status = batch->status;
  const auto found =
      std::ranges::find_if(queue_, [&](const auto& queued) { return queued.get() == batch; });
  if (found != queue_.end()) {
    batch->chunks.clear();
    batch->firsts.clear();
    batch->gpu = nullptr;
    batch->moved = {};
    batch->in_place = batch->arrived = false;
    spare_.push_back(std::move(*found));
    queue_.erase(found);
  }
  has_done_.notify_all();
}

}  // namespace lightckpt
