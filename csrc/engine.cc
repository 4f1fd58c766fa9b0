// What callers ask for: batches, commits, giving up. See engine.h.
#include "engine.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace lightckpt {

Engine::Engine(std::unique_ptr<Store> store, uint32_t workers)
    : store_(std::move(store)), queue_(!store_->media().may_stall()) {
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
  // Nobody can wait for them any more, so their memory may be gone. A commit has its own copy.
  leave_out(false);
  queue_.stop();
  for (std::thread& thread : threads_) thread.join();
}

void Engine::leave_out(bool writes_only) {
  while (Batch* const batch = queue_.give_up(writes_only)) complete(batch);
  devices_.cancel(writes_only);
}

Status Engine::begin(uint64_t step, uint32_t keep, std::vector<uint64_t> extents, Bytes blob,
                     uint64_t host_bytes) {
  RETURN_IF_ERROR(draft_.may_begin());
  Attempt attempt;
  Status status = store_->begin(step, keep, std::move(extents), blob, host_bytes, &attempt);
  draft_.note_lost(status);
  if (!status.ok()) return status;
  devices_.begin(store_->media());
  draft_.open(std::move(attempt));
  return {};
}

Status Engine::submit(Op op, uint64_t version, std::span<const Span> spans, uint64_t* number) {
  std::unique_ptr<Batch> batch;
  RETURN_IF_ERROR(make_batch(op, version, spans, false, &batch));
  Batch* const queued = batch.get();
  const bool empty = batch->chunks.empty();
  RETURN_IF_ERROR(enqueue(std::move(batch), number));
  if (empty) complete(queued);
  return {};
}

Status Engine::make_batch(Op op, uint64_t version, std::span<const Span> spans, bool on_device,
                          std::unique_ptr<Batch>* made) {
  std::unique_ptr<Batch> batch = queue_.spare();
  batch->op = op;
  batch->on_device = on_device;
  if (version == 0) {
    if (op != Op::kWrite && op != Op::kCheck) {
      return {Code::kInvalid, "the version in flight can be written and checked only"};
    }
    RETURN_IF_ERROR(draft_.join(spans, batch.get()));
  } else {
    if (op == Op::kWrite || op == Op::kCommit) {
      return {Code::kInvalid, "version " + std::to_string(version) + " is committed: read it only"};
    }
    Version found;
    Bytes host;
    RETURN_IF_ERROR(store_->find(version, &found));
    RETURN_IF_ERROR(store_->read_record(found, &batch->table, &host));
    RETURN_IF_ERROR(batch->cut(*found.layout, found.slot.record_offset, spans));
  }
  *made = std::move(batch);
  return {};
}

// A batch that is refused is in the version in flight no more.
Status Engine::enqueue(std::unique_ptr<Batch> batch, uint64_t* number) {
  const bool of_draft = batch->of_draft;
  Status status = queue_.push(&batch, number);
  if (!status.ok() && of_draft) draft_.leave(*batch, {}, 0);
  return status;
}

Status Engine::open_device(const CudaDriver& driver, int ordinal, const DeviceOptions& options,
                           DeviceInfo* info) {
  return devices_.open(driver, ordinal, options, store_.get(), info);
}

Status Engine::submit_on(const OnDevice& on, Op op, uint64_t version, std::span<const Span> spans,
                         uint64_t* number) {
  if (op == Op::kVerify) return {Code::kInvalid, "to verify takes no memory of a device"};
  RETURN_IF_ERROR(devices_.check_open(on.ordinal));
  std::unique_ptr<Batch> batch;
  RETURN_IF_ERROR(make_batch(op, version, spans, true, &batch));
  Batch* const queued = batch.get();
  RETURN_IF_ERROR(enqueue(std::move(batch), number));
  Status status;
  try {
    status = devices_.submit(on, store_->media(), queued);
  } catch (const std::exception&) {
    status = no_host_memory();
  }
  if (!status.ok()) withdraw(queued, status);
  return status;
}

// The devices never took it: the version in flight may have the same by another way.
void Engine::withdraw(Batch* batch, Status status) {
  draft_.leave(*batch, {}, 0);
  finish(batch, std::move(status));
}

Status Engine::stream_wait(uint64_t number, uint64_t stream, int64_t timeout_ns) {
  Status status;
  if (devices_.stream_wait(number, stream, timeout_ns, &status)) return status;
  return queue_.failure_of(number);  // it is done, or has not to do with a device
}

// Who waits has a core, and a worker may have to wait for one.
Status Engine::wait(uint64_t number, int64_t timeout_ns, Report* report) {
  const Deadline deadline(timeout_ns);
  Turn turn;
  while (!deadline.passed() && queue_.help(number, &turn)) run(turn);
  return queue_.wait(number, deadline, report);
}

Status Engine::queue_commit(Bytes host, uint64_t* number) {
  std::unique_ptr<Batch> batch = queue_.spare();
  batch->op = Op::kCommit;
  batch->host.assign(host.begin(), host.end());
  RETURN_IF_ERROR(draft_.queue_commit());
  if (Status status = queue_.push(&batch, number); !status.ok()) {
    draft_.take_back_commit();
    return status;
  }
  release_commit();
  return {};
}

// Asked by each who brings about what a commit waits for: whoever comes last lets it run.
void Engine::release_commit() {
  if (draft_.commit_may_run()) queue_.release_commit();
}

Status Engine::drop(int64_t timeout_ns) {
  RETURN_IF_ERROR(draft_.drop());
  leave_out(true);
  // Workers write into the version's area: it is free only when they have left it.
  return draft_.wait_left(Deadline(std::max<int64_t>(timeout_ns, 0)));
}

Status Engine::rebase(uint64_t version) {
  RETURN_IF_ERROR(draft_.may_rebase());
  const Status status = store_->rebase(version);
  draft_.note_lost(status);
  return status;
}

}  // namespace lightckpt
