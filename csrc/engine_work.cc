// What a worker does with its turns. See engine.h.
#include <pthread.h>
#include <sched.h>

#include <exception>
#include <utility>

#include "crc32c.h"
#include "engine.h"
#include "sigbus.h"
#include "signals.h"

namespace lightckpt {
namespace {

// A worker that is woken must not push the training thread off its core: under this policy it gets
// the same share of time, but takes it later. Only a hint, so a refusal does not matter.
void be_patient() {
  const sched_param parameters = {};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &parameters);
}

// An exception is an error of what was being done, and of nothing else.
template <typename Body>
Status guarded(const Body& body) {
  try {
    return body();
  } catch (const std::exception&) {
    return no_host_memory();
  }
}

}  // namespace

void Engine::work() {
  block_signals();
  be_patient();
  for (Turn turn = queue_.next(); turn.kind != Turn::Kind::kEnd; turn = queue_.next()) run(turn);
}

void Engine::run(const Turn& turn) {
  switch (turn.kind) {
    case Turn::Kind::kEnd:
      return;
    case Turn::Kind::kDrain:
      return run_drain();
    case Turn::Kind::kPoll:
      return run_poll();
    case Turn::Kind::kCommit:
      return run_commit(turn.batch);
    case Turn::Kind::kChunks:
      return run_chunks(turn);
    case Turn::Kind::kArrived:
      return run_arrived(turn.batch);
  }
}

// Copied is enough for the trainer; the slow way to the disk starts now, not at the commit.
void Engine::run_drain() {
  draft_.drained(guarded([&] { return store_->media().drain(); }));
  release_commit();
}

void Engine::run_commit(Batch* batch) {
  const SigbusGuard::Armed armed;
  // Who released it may have looked at the version before this one.
  if (!draft_.commit_may_run()) {
    queue_.hold_commit(batch);
    return release_commit();  // what it waits for may have left meanwhile
  }
  const uint64_t begin = now_ns();
  Status status = guarded([&] { return draft_.commit(store_.get(), batch->host); });
  draft_.conclude(status, batch->host.size(), now_ns() - begin);
  queue_.note_bytes(batch, batch->host.size());
  finish(batch, std::move(status));
}

void Engine::run_chunks(const Turn& turn) {
  Batch* const batch = turn.batch;
  Status status = guarded([&]() -> Status {
    const SigbusGuard::Armed armed;
    for (size_t i = turn.begin; i < turn.end; ++i) {
      const Chunk& chunk = batch->chunks[i];
      if (!copy_chunk(*batch, chunk)) queue_.note_bad(batch, chunk.extent);
    }
    fence_after(batch->op);
    return {};
  });
  if (status.ok() && batch->op == Op::kWrite) {
    draft_.note_written(*batch, turn.begin, turn.end, turn.bytes);
  }
  if (queue_.done(turn, std::move(status))) complete(batch);
}

// This thread's stores are ordered by this thread's fence only.
void Engine::fence_after(Op op) { op == Op::kWrite ? store_->media().fence() : store_fence(); }

// False if the chunk's bytes are not those of its checksum.
bool Engine::copy_chunk(const Batch& batch, const Chunk& chunk) {
  Media& media = store_->media();
  const std::byte* stored = media.view() + chunk.offset;
  switch (batch.op) {
    case Op::kWrite:
      draft_.checksum(chunk.index) =
          media.nt_copy_crc(chunk.offset, Bytes(chunk.memory, chunk.bytes));
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

// A batch that is through. What it met is the version's in flight, if it is of that; then it is
// finished: who hears of it finds all this done.
void Engine::complete(Batch* batch) {
  Media& media = store_->media();
  const Op op = batch->op;
  uint32_t bad_count = 0;
  Status status = guarded([&] { return queue_.outcome(*batch, &bad_count); });
  if (status.ok() && op != Op::kCheck) status = guarded([&] { return media.check(); });
  if (status.ok() && op == Op::kWrite && media.granularity() == Granularity::kPage) {
    draft_.await_drain();
    if (!queue_.ask_to_drain()) draft_.drained({});
  }
  draft_.leave(*batch, status, bad_count);
  finish(batch, std::move(status));
}

void Engine::finish(Batch* batch, Status status) {
  const uint64_t number = batch->number;
  const bool on_device = batch->on_device;
  queue_.finish(batch, std::move(status));
  if (on_device) devices_.forget(number);
  release_commit();
}

}  // namespace lightckpt
