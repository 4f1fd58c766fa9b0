// What a worker does with the chunks it has taken, and with a commit. See engine.h.
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>

#include "crc32c.h"
#include "engine.h"

namespace lightckpt {
namespace {

// Signals are the trainer's business; a fault in a worker must still reach its handler.
void block_signals() {
  sigset_t signals;
  sigfillset(&signals);
  for (int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT}) sigdelset(&signals, fault);
  pthread_sigmask(SIG_SETMASK, &signals, nullptr);
}

// A worker that is woken must not push the training thread off its core: under this policy it gets
// the same share of time, but takes it later. Only a hint, so a refusal does not matter.
void be_patient() {
  const sched_param parameters = {};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &parameters);
}

}  // namespace

void Engine::work() {
  block_signals();
  be_patient();
  std::unique_lock lock(mutex_);
  while (true) {
    if (drain_early_) {
      // Copied is enough for the trainer; the slow way to the disk starts now, not at the commit.
      drain_early_ = false;
      lock.unlock();
      Status status = store_->media().drain();
      lock.lock();
      if (status.code() == Code::kLost && failed_.ok()) failed_ = status;
      continue;
    }
    // In their turn: a commit goes alone, but chunks of batches before it may still be running.
    const auto found = std::ranges::find_if(queue_, [&](const auto& b) {
      return !b->taken() && (b->op != Op::kCommit || !awaits_device());
    });
    if (found != queue_.end()) {
      // Whoever asks the devices may be this one.
      if (on_devices_ > 0 && !polling_) has_work_.notify_one();
      run_some(found->get(), lock);
    } else if (on_devices_ > 0 && !polling_) {
      poll(lock);
    } else if (stopping_ && on_devices_ == 0) {
      return;
    } else {
      has_work_.wait(lock);
    }
  }
}

// Takes a commit, or chunks of up to about a MiB, and does them without the lock.
void Engine::run_some(Batch* batch, std::unique_lock<std::mutex>& lock) {
  if (batch->report.start_ns == 0) batch->report.start_ns = now_ns();
  const size_t begin = batch->next;
  if (batch->op == Op::kCommit) {
    batch->next = 1;
    lock.unlock();
    run_commit(batch);
    lock.lock();
  } else {
    uint64_t bytes = 0;
    while (!batch->taken() && bytes < kChunkBytes) bytes += batch->chunks[batch->next++].bytes;
    const size_t end = batch->next;
    lock.unlock();
    run_chunks(batch, begin, end);
    lock.lock();
    batch->report.bytes += bytes;
    if (batch->op == Op::kWrite) note_written(*batch, begin, end, bytes);
    batch->remaining -= end - begin;
  }
  if (batch->remaining > 0) return;
  drain_early_ |= batch->op == Op::kWrite && store_->media().granularity() == Granularity::kPage;
  finish(batch);
  // A check that came from a device may have waited for it.
  if (on_devices_ > 0) finish_arrived();
}

// With the mutex held. Counted once each: a chunk that was written twice does not stand in for
// another.
void Engine::note_written(const Batch& batch, size_t begin, size_t end, uint64_t bytes) {
  for (size_t i = begin; i < end; ++i) {
    const uint64_t index = batch.chunks[i].index;
    chunks_written_ += written_[index] ? 0 : 1;
    written_[index] = true;
  }
  counters_.bytes_persisted += bytes;
}

// With the mutex held.
void Engine::note_bad(Batch* batch, uint32_t extent) {
  Report& report = batch->report;
  if (report.bad_count < report.bad.size()) report.bad[report.bad_count] = extent;
  ++report.bad_count;
}

void Engine::run_chunks(Batch* batch, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    const Chunk& chunk = batch->chunks[i];
    if (run_chunk(*batch, chunk)) continue;
    std::lock_guard lock(mutex_);
    note_bad(batch, chunk.extent);
  }
  // This thread's stores are ordered by this thread's fence only.
  if (batch->op == Op::kWrite) {
    store_->media().fence();
  } else {
    store_fence();
  }
}

// False if the chunk's bytes are not those of its checksum.
bool Engine::run_chunk(const Batch& batch, const Chunk& chunk) {
  Media& media = store_->media();
  const std::byte* stored = media.view() + chunk.offset;
  switch (batch.op) {
    case Op::kWrite:
      table_[chunk.index] = media.nt_copy_crc(chunk.offset, Bytes(chunk.memory, chunk.bytes));
      return true;
    case Op::kRead:
      media.populate(chunk.offset, chunk.bytes);
      return copy_nt_crc(chunk.memory, stored, chunk.bytes) == batch.table[chunk.index];
    case Op::kCopy:
      media.populate(chunk.offset, chunk.bytes);
      copy_nt(chunk.memory, stored, chunk.bytes);
      return true;
    case Op::kCheck:
      return crc32c(0, chunk.memory, chunk.bytes) == batch.table[chunk.index];
    case Op::kVerify:
      media.populate(chunk.offset, chunk.bytes);
      return crc32c(0, stored, chunk.bytes) == batch.table[chunk.index];
    case Op::kCommit:
      break;
  }
  CHECK(false);
}

void Engine::run_commit(Batch* batch) {
  const uint64_t begin = now_ns();
  const Status status = commit_attempt(batch->host);
  std::lock_guard lock(mutex_);
  batch->status = status;
  batch->remaining = 0;
  batch->report.bytes = batch->host.size();
  attempt_open_ = dropping_ = committing_ = false;
  if (!status.ok()) {
    ++counters_.drops;
    return;
  }
  ++counters_.commits;
  counters_.bytes_persisted += batch->host.size();
  counters_.commit_ns = now_ns() - begin;
}

Status Engine::commit_attempt(Bytes host) {
  {
    std::lock_guard lock(mutex_);
    if (!failed_.ok()) return failed_;
    if (!verdict_.ok()) return verdict_;
    if (chunks_written_ != table_.size()) {
      return {Code::kIo, std::to_string(table_.size() - chunks_written_) + " of " +
                             std::to_string(table_.size()) +
                             " chunks did not come from the device: the version is dropped"};
    }
  }
  const Status status = store_->commit(attempt_, table_, host);
  std::lock_guard lock(mutex_);
  if (failed_.ok() && status.code() == Code::kLost) failed_ = status;
  return status;
}

}  // namespace lightckpt
