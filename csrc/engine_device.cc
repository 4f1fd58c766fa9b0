// Batches of memory on a GPU: submitting them, and what workers do with the pieces. See engine.h.
#include <algorithm>

#include "crc32c.h"
#include "engine.h"

namespace lightckpt {
namespace {

// How long the worker that asks the devices waits before it asks again.
constexpr std::chrono::microseconds kPauseMin{20};
constexpr std::chrono::microseconds kPauseMax{500};
constexpr std::chrono::seconds kGrowDeadline{60};

// A device writes there, and the media hears of it by dma_done.
std::byte* place_in(const Media& media, uint64_t offset) {
  return const_cast<std::byte*>(media.view()) + offset;
}

}  // namespace

Status Engine::open_device(const CudaDriver& driver, int ordinal, uint64_t ring_bytes,
                           DeviceInfo* info) {
  Gpu* gpu = find_gpu(ordinal);
  if (gpu == nullptr) {
    const Gpu* const first = gpus_.empty() ? nullptr : gpus_.front().get();
    std::unique_ptr<Gpu> opened;
    RETURN_IF_ERROR(Gpu::open(driver, ordinal, ring_bytes, first, &opened));
    const Media& media = store_->media();
    if (first == nullptr && media.granularity() == Granularity::kPage) {
      opened->keep_off({Code::kIo,
                        "the store is a plain file: msync does not hear of what a GPU "
                        "writes"});
    } else if (first == nullptr) {
      (void)opened->cover(place_in(media, 0), media.size());
    }
    gpu = opened.get();
    std::lock_guard lock(mutex_);
    gpus_.push_back(std::move(opened));
  }
  RETURN_IF_ERROR(driver.device_name(ordinal, &info->name));
  RETURN_IF_ERROR(driver.version(&info->driver_version));
  info->ring_bytes = gpu->ring_bytes();
  info->direct = gpu->reach();
  return {};
}

Gpu* Engine::find_gpu(int ordinal) {
  std::lock_guard lock(mutex_);
  const auto found =
      std::ranges::find_if(gpus_, [&](const auto& gpu) { return gpu->ordinal() == ordinal; });
  return found == gpus_.end() ? nullptr : found->get();
}

// For a new attempt: the media may have grown. Where a device does not reach the new part, it is
// told to whoever submits.
Status Engine::cover_media() {
  std::unique_lock lock(mutex_);
  const auto none_in_place = [&] {
    return std::ranges::none_of(queue_, [](const auto& batch) { return batch->in_place; });
  };
  for (const auto& gpu : gpus_) RETURN_IF_ERROR(gpu->begin());
  if (gpus_.empty() || !gpus_.front()->reach().ok()) return {};
  if (!has_done_.wait_for(lock, kGrowDeadline, none_in_place)) {
    return {Code::kTimeout, "the store has grown, and a GPU still reads from it"};
  }
  (void)gpus_.front()->cover(place_in(store_->media(), 0), store_->media().size());
  return {};
}

Status Engine::submit_on(const OnDevice& on, Op op, uint64_t version, std::span<const Span> spans,
                         uint64_t* number) {
  if (op == Op::kVerify) return {Code::kInvalid, "to verify takes no memory of a device"};
  Gpu* const gpu = find_gpu(on.ordinal);
  if (gpu == nullptr) {
    return {Code::kInvalid, "device " + std::to_string(on.ordinal) + " has not been opened"};
  }
  std::unique_ptr<Batch> batch;
  RETURN_IF_ERROR(make_batch(op, version, spans, &batch));
  return enqueue_on(gpu, on, std::move(batch), number);
}

Status Engine::enqueue_on(Gpu* gpu, const OnDevice& on, std::unique_ptr<Batch> batch,
                          uint64_t* number) {
  // A check compares what lies on the device, so nothing of it may reach the media.
  const Snapshot how = batch->op == Op::kCheck ? Snapshot::kHost : on.how;
  std::vector<DeviceSpan> spans;
  for (size_t i = 0; i < batch->firsts.size(); ++i) {
    const size_t end = i + 1 < batch->firsts.size() ? batch->firsts[i + 1] : batch->chunks.size();
    DeviceSpan span = {0, 0, nullptr};
    for (size_t at = batch->firsts[i]; at < end; ++at) span.bytes += batch->chunks[at].bytes;
    if (span.bytes > 0) {
      const Chunk& first = batch->chunks[batch->firsts[i]];
      span.device = cuda_pointer(first.memory);
      span.place = place_in(store_->media(), first.offset);
    }
    spans.push_back(span);
  }
  const bool outward = batch->op == Op::kWrite || batch->op == Op::kCheck;
  // Held meanwhile: a piece may arrive before its batch would be known.
  std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(number_it(batch.get(), number));
  batch->next = batch->chunks.size();  // there are none for workers, but as pieces
  batch->remaining = batch->chunks.size();
  batch->sums.assign(batch->op == Op::kCheck ? batch->chunks.size() : 0, 0);
  batch->in_place = how != Snapshot::kHost && gpu->reach().ok();
  RETURN_IF_ERROR(
      gpu->submit(outward ? Way::kOut : Way::kIn, how, on.stream, spans, &batch->moved));
  batch->gpu = gpu;
  ++on_devices_;
  pause_ = kPauseMin;
  queue_.push_back(std::move(batch));
  has_work_.notify_one();
  return {};
}

Status Engine::stream_wait(uint64_t number, uint64_t stream, int64_t timeout_ns) {
  Gpu* gpu = nullptr;
  Moved moved;
  {
    std::lock_guard lock(mutex_);
    const Finished& place = finished_[number % kReports];
    if (number > 0 && place.number == number) return place.status;
    if (number == 0 || number >= next_number_) {
      return {Code::kNotFound, "batch " + std::to_string(number) + " was never submitted"};
    }
    for (const auto& batch : queue_) {
      if (batch->number == number) gpu = batch->gpu, moved = batch->moved;
    }
  }
  if (gpu == nullptr) return {};  // done long ago, or it has not to do with a device
  return gpu->stream_wait(moved, stream, timeout_ns);
}

// With the mutex held: is something of the attempt still on its way from a device?
bool Engine::awaits_device() const {
  return on_devices_ > 0 && std::ranges::any_of(queue_, [&](const auto& batch) {
           return batch->gpu != nullptr && batch->table == table_.data();
         });
}

// With the mutex held, which it lets go meanwhile. Asks each device for a piece, and does it.
void Engine::poll(std::unique_lock<std::mutex>& lock) {
  polling_ = true;
  const size_t count = gpus_.size();
  Gpu* from = nullptr;
  Piece piece;
  for (size_t i = 0; i < count && from == nullptr; ++i) {
    Gpu* const gpu = gpus_[i].get();
    lock.unlock();
    if (gpu->mover().next(0, &piece).ok()) from = gpu;
    lock.lock();
    collect_finished(gpu);
  }
  if (from == nullptr && on_devices_ > 0) {
    has_work_.wait_for(lock, pause_);
    pause_ = std::min(pause_ * 2, kPauseMax);
  }
  polling_ = false;
  if (from == nullptr) return;
  pause_ = kPauseMin;
  has_work_.notify_one();  // to ask on
  run_piece(from, piece, lock);
}

// With the mutex held, which it lets go meanwhile.
void Engine::run_piece(Gpu* gpu, const Piece& piece, std::unique_lock<std::mutex>& lock) {
  Batch* const batch = find_moved(gpu, piece.batch);
  CHECK(batch != nullptr);
  if (batch->report.start_ns == 0) batch->report.start_ns = now_ns();
  lock.unlock();
  std::vector<uint32_t> bad;
  const uint32_t chunks = run_parts(batch, piece, &bad);
  lock.lock();
  for (const uint32_t extent : bad) note_bad(batch, extent);
  batch->report.bytes += piece.bytes;
  if (batch->op == Op::kWrite) {
    const size_t first = batch->firsts[piece.span] + piece.offset / kChunkBytes;
    note_written(*batch, first, first + chunks, piece.bytes);
  }
  lock.unlock();
  gpu->mover().finish(piece, {});
  lock.lock();
  collect_finished(gpu);
}

// Returns how many chunks the piece had: they follow one another in the batch.
uint32_t Engine::run_parts(Batch* batch, const Piece& piece, std::vector<uint32_t>* bad) {
  const size_t first = batch->firsts[piece.span] + piece.offset / kChunkBytes;
  size_t at = first;
  std::byte* staged = piece.memory;
  uint64_t left = piece.bytes;
  for (uint32_t i = 0; i < piece.spans; ++i) {
    const size_t next = piece.span + i + 1;
    const size_t end = next < batch->firsts.size() ? batch->firsts[next] : batch->chunks.size();
    uint64_t bytes = 0;
    for (; at < end && bytes < left; ++at) {
      std::byte* const memory = piece.in_place ? nullptr : staged + bytes;
      if (!run_staged(batch, at, memory)) bad->push_back(batch->chunks[at].extent);
      bytes += batch->chunks[at].bytes;
    }
    if (!piece.in_place) staged += Piece::next_part(bytes);
    left -= bytes;
  }
  // This thread's stores are ordered by this thread's fence only.
  batch->op == Op::kWrite ? store_->media().fence() : store_fence();
  return static_cast<uint32_t>(at - first);
}

// A chunk whose bytes are in staging, or are to be; null: the device has its place. False if they
// are not those of their checksum.
bool Engine::run_staged(Batch* batch, size_t at, std::byte* staged) {
  const Chunk& chunk = batch->chunks[at];
  Media& media = store_->media();
  const std::byte* const stored = media.view() + chunk.offset;
  switch (batch->op) {
    case Op::kWrite:
      if (staged == nullptr) {
        // First the checksum: where flushing evicts a line, it would come back for that.
        table_[chunk.index] = crc32c(0, stored, chunk.bytes);
        media.dma_done(chunk.offset, chunk.bytes);
      } else {
        table_[chunk.index] = media.nt_copy_crc(chunk.offset, Bytes(staged, chunk.bytes));
      }
      return true;
    case Op::kRead:
      media.populate(chunk.offset, chunk.bytes);
      return (staged == nullptr
                  ? crc32c(0, stored, chunk.bytes)
                  : copy_nt_crc(staged, stored, chunk.bytes)) == batch->table[chunk.index];
    case Op::kCopy:
      if (staged == nullptr) return true;
      media.populate(chunk.offset, chunk.bytes);
      copy_nt(staged, stored, chunk.bytes);
      return true;
    case Op::kCheck:
      // Compared when what it is compared with is there: a write may still be under way.
      batch->sums[at] = crc32c(0, staged, chunk.bytes);
      return true;
    case Op::kVerify:
    case Op::kCommit:
      break;
  }
  CHECK(false);
}

// With the mutex held.
Engine::Batch* Engine::find_moved(const Gpu* gpu, uint64_t moved) {
  const auto found = std::ranges::find_if(
      queue_, [&](const auto& batch) { return batch->gpu == gpu && batch->moved.batch == moved; });
  return found == queue_.end() ? nullptr : found->get();
}

// With the mutex held.
void Engine::collect_finished(Gpu* gpu) {
  uint64_t moved = 0;
  bool any = false;
  while (gpu->mover().next_finished(&moved)) {
    Batch* const batch = find_moved(gpu, moved);
    CHECK(batch != nullptr);
    batch->status = gpu->mover().wait(moved, 0);
    batch->remaining = 0;
    batch->arrived = any = true;
    drain_early_ |= batch->op == Op::kWrite && store_->media().granularity() == Granularity::kPage;
  }
  if (any) finish_arrived();
}

// With the mutex held. Checks come after the writes that they are of.
void Engine::finish_arrived() {
  while (true) {
    const auto found = std::ranges::find_if(
        queue_, [&](const auto& batch) { return batch->arrived && !awaits_writes(*batch); });
    if (found == queue_.end()) break;
    Batch* const batch = found->get();
    for (size_t at = 0; batch->status.ok() && at < batch->sums.size(); ++at) {
      const Chunk& chunk = batch->chunks[at];
      if (batch->sums[at] != batch->table[chunk.index]) note_bad(batch, chunk.extent);
    }
    judge(*batch);
    finish(batch);
  }
  // A commit may have waited for one of them, or the end.
  has_work_.notify_all();
}

// With the mutex held. Who commits has not waited for what comes from a device, nor looked at it.
void Engine::judge(const Batch& batch) {
  if (batch.table != table_.data()) return;  // not of the attempt
  if (!batch.status.ok()) {
    const char* const what = batch.op == Op::kCheck ? "what was copied could not be checked: "
                                                    : "a copy from a device failed: ";
    verdict_ = {Code::kIo, what + batch.status.message()};
  } else if (batch.report.bad_count > 0 && verdict_.ok()) {
    verdict_ = {Code::kChanged,
                "what was copied differs from its checksums: the version is dropped"};
  }
}

// With the mutex held.
bool Engine::awaits_writes(const Batch& check) const {
  return check.op == Op::kCheck && std::ranges::any_of(queue_, [&](const auto& batch) {
           return batch->op == Op::kWrite && batch->table == check.table &&
                  batch->number < check.number;
         });
}

}  // namespace lightckpt
