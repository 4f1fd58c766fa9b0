// Cutting, handing round and counting pieces. See staging.h.
#include "staging.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace lightckpt {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

// How long to wait before the device is asked again.
constexpr microseconds kPauseMin{20};
constexpr microseconds kPauseMax{1000};

}  // namespace

Status Staging::make(CudaDevice* device, uint64_t ring_bytes, uint64_t piece_bytes,
                     std::unique_ptr<Staging>* staging) {
  CHECK(piece_bytes > 0 && ring_bytes > 0 && ring_bytes % piece_bytes == 0);
  std::unique_ptr<Staging> made(new Staging(device));
  RETURN_IF_ERROR(CudaPinnedBuffer::make(device->context(), ring_bytes, &made->buffer_));
  made->piece_bytes_ = piece_bytes;
  made->slots_.resize(ring_bytes / piece_bytes);
  for (size_t slot = made->slots_.size(); slot-- > 0;) {
    made->free_.push_back(static_cast<uint32_t>(slot));
  }
  *staging = std::move(made);
  return {};
}

Status Staging::submit(Way way, uint64_t stream, std::span<const DeviceSpan> spans,
                       uint64_t* number) {
  const Lock lock(mutex_);
  if (batches_.size() == kBatchesMax) {
    return {Code::kBusy, std::to_string(kBatchesMax) + " batches are unfinished: wait for some"};
  }
  Batch batch;
  RETURN_IF_ERROR(device_->order_after(stream, &batch.lane));
  if (!spare_.empty()) {
    batch.spans = std::move(spare_.back());
    spare_.pop_back();
  }
  batch.spans.assign(spans.begin(), spans.end());
  batch.number = *number = next_number_++;
  batch.way = way;
  skip_empty(&batch);
  batches_.push_back(std::move(batch));
  moved_ = true;
  pump();
  return {};
}

Status Staging::next(int64_t timeout_ns, StagedPiece* piece) {
  return wait_until(timeout_ns, "there is no piece", [&] { return take(piece); });
}

bool Staging::take(StagedPiece* piece) {
  if (!arrived_.empty()) {
    *piece = slots_[arrived_.front()].piece;
    arrived_.pop_front();
    ++taken_;
    return true;
  }
  for (Batch& batch : batches_) {
    if (batch.way != Way::kIn || batch.cut() || free_.empty()) continue;
    const uint32_t slot = free_.back();
    free_.pop_back();
    cut_piece(&batch, slot);
    ++batch.with_worker;
    ++taken_;
    *piece = slots_[slot].piece;
    return true;
  }
  return false;
}

void Staging::finish(const StagedPiece& piece, const Status& status) {
  const Lock lock(mutex_);
  Batch* const batch = find(piece.batch);
  CHECK(batch != nullptr && batch->with_worker > 0 && taken_ > 0);
  --batch->with_worker;
  --taken_;
  moved_ = true;
  if (!status.ok()) fail(batch, status);
  if (piece.way == Way::kIn && batch->status.ok()) {
    give_to_device(batch, piece.slot);
  } else {
    free_.push_back(piece.slot);
  }
  pump();
}

Status Staging::stream_wait(uint64_t number, uint64_t stream, int64_t timeout_ns) {
  uint64_t last = 0;
  Status status;
  const auto all_given = [&] {
    const Batch* const batch = find(number);
    if (batch == nullptr) {
      status = report_of(number);
      return true;
    }
    status = batch->status;
    last = batch->last_copy;
    return batch->cut() && (batch->way == Way::kOut || batch->with_worker == 0);
  };
  RETURN_IF_ERROR(wait_until(timeout_ns, "not all pieces are with the device", all_given));
  if (last == 0) return status;
  const Status ordered = device_->stream_wait(last, stream);
  return status.ok() ? ordered : status;
}

Status Staging::wait(uint64_t number, int64_t timeout_ns) {
  Status status;
  const auto is_finished = [&] {
    if (find(number) != nullptr) return false;
    status = report_of(number);
    return true;
  };
  RETURN_IF_ERROR(wait_until(timeout_ns, "the batch is not finished", is_finished));
  return status;
}

Status Staging::close() {
  const Lock lock(mutex_);
  Status status;
  const auto keep_first = [&](const Status& one) {
    if (status.ok()) status = one;
  };
  CHECK(taken_ == 0);
  for (const uint32_t slot : with_device_) {
    const Status waited = device_->wait(slots_[slot].copy, -1);
    // As in is_through.
    if (!waited.ok()) (void)device_->wait(slots_[slot].copy, -1);
    keep_first(waited);
  }
  with_device_.clear();
  batches_.clear();
  keep_first(buffer_.reset());
  return status;
}

// Waits until `ready` says so, with the mutex held. Between, pieces go round: whoever waits sees to
// that.
template <typename Ready>
Status Staging::wait_until(int64_t timeout_ns, const char* what, const Ready& ready) {
  const auto start = steady_clock::now();
  nanoseconds pause = kPauseMin;
  Lock lock(mutex_);
  while (true) {
    pump();
    if (ready()) return {};
    if (timeout_ns >= 0) {
      const nanoseconds left = nanoseconds(timeout_ns) - (steady_clock::now() - start);
      if (left <= nanoseconds(0)) {
        return {Code::kTimeout,
                std::string(what) + " after " + std::to_string(timeout_ns / 1'000'000) + " ms"};
      }
      pause = std::min(pause, left);
    }
    changed_.wait_for(lock, pause);
    pause = std::min<nanoseconds>(pause * 2, kPauseMax);
  }
}

// Takes back what the device is through with, and gives it what fits.
void Staging::pump() {
  collect_done();
  for (Batch& batch : batches_) {
    while (batch.way == Way::kOut && !batch.cut() && !free_.empty()) {
      const uint32_t slot = free_.back();
      free_.pop_back();
      cut_piece(&batch, slot);
      give_to_device(&batch, slot);
    }
  }
  finish_batches();
  // Not otherwise: those who wait would wake one another for ever.
  if (std::exchange(moved_, false)) changed_.notify_all();
}

void Staging::collect_done() {
  uint64_t waiting = 0;  // lanes whose first piece is not done: the others on it are not either
  for (size_t left = with_device_.size(); left > 0; --left) {
    const uint32_t index = with_device_.front();
    with_device_.pop_front();
    Slot& slot = slots_[index];
    const uint64_t lane = uint64_t{1} << (slot.lane % 64);
    if ((waiting & lane) != 0 || !is_through(&slot)) {
      waiting |= lane;
      with_device_.push_back(index);  // after all of them, the order is as it was
      continue;
    }
    Batch* const batch = find(slot.piece.batch);
    --batch->with_device;
    moved_ = true;
    if (batch->way == Way::kOut && batch->status.ok()) {
      ++batch->with_worker;
      arrived_.push_back(index);
    } else {
      free_.push_back(index);
    }
  }
}

bool Staging::is_through(Slot* slot) {
  bool done = false;
  const Status status = device_->done(slot->copy, &done);
  if (status.ok()) {
    slot->errors = 0;
    return done;
  }
  fail(find(slot->piece.batch), status);
  // One error may be of what others did, and the copy still under way. Two in a row: the context is
  // lost, and nothing is under way.
  return ++slot->errors >= 2;
}

void Staging::skip_empty(Batch* batch) const {
  while (!batch->cut() && batch->offset == batch->spans[batch->span].bytes) {
    ++batch->span;
    batch->offset = 0;
  }
}

void Staging::cut_piece(Batch* batch, uint32_t slot) {
  const uint64_t left = batch->spans[batch->span].bytes - batch->offset;
  StagedPiece& piece = slots_[slot].piece;
  piece.batch = batch->number;
  piece.way = batch->way;
  piece.span = static_cast<uint32_t>(batch->span);
  piece.offset = batch->offset;
  piece.bytes = std::min(left, piece_bytes_);
  piece.memory = buffer_.pinned().memory + slot * piece_bytes_;
  piece.slot = slot;
  batch->offset += piece.bytes;
  skip_empty(batch);
}

void Staging::give_to_device(Batch* batch, uint32_t index) {
  Slot& slot = slots_[index];
  const StagedPiece& piece = slot.piece;
  const CudaPointer device = batch->spans[piece.span].device + piece.offset;
  const CudaSpan span = {device, index * piece_bytes_, piece.bytes};
  uint64_t copy = 0;
  const Status status =
      batch->way == Way::kOut
          ? device_->copy_out(batch->lane, std::span(&span, 1), buffer_.pinned(), &copy)
          : device_->copy_in(batch->lane, std::span(&span, 1), buffer_.pinned(), &copy);
  moved_ = true;
  if (!status.ok()) fail(batch, status);
  if (copy == 0) {
    free_.push_back(index);
    return;
  }
  slot.copy = copy;
  slot.errors = 0;
  slot.lane = batch->lane;
  ++batch->with_device;
  with_device_.push_back(index);
  batch->last_copy = copy;
}

// What is left of it is left out, and pieces that no worker has taken are free.
void Staging::fail(Batch* batch, const Status& status) {
  if (!batch->status.ok()) return;
  batch->status = status;
  batch->span = batch->spans.size();
  std::erase_if(arrived_, [&](uint32_t slot) {
    if (slots_[slot].piece.batch != batch->number) return false;
    --batch->with_worker;
    free_.push_back(slot);
    return true;
  });
}

void Staging::finish_batches() {
  std::erase_if(batches_, [&](Batch& batch) {
    if (!batch.cut() || batch.with_device > 0 || batch.with_worker > 0) return false;
    finished_[batch.number % kReports] = {batch.number, std::move(batch.status)};
    spare_.push_back(std::move(batch.spans));
    moved_ = true;
    return true;
  });
}

Staging::Batch* Staging::find(uint64_t number) {
  for (Batch& batch : batches_) {
    if (batch.number == number) return &batch;
  }
  return nullptr;
}

Status Staging::report_of(uint64_t number) const {
  CHECK(number > 0 && number < next_number_);
  const Finished& finished = finished_[number % kReports];
  if (finished.number == number) return finished.status;
  return {Code::kInvalid, "batch " + std::to_string(number) + " is too old to be asked for"};
}

}  // namespace lightckpt
