// Cutting, handing round and counting pieces. See mover.h.
#include "mover.h"

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

Status Mover::make(CudaDevice* device, uint64_t ring_bytes, uint64_t piece_bytes,
                   std::unique_ptr<Mover>* mover) {
  CHECK(piece_bytes > 0 && ring_bytes > 0 && ring_bytes % piece_bytes == 0);
  std::unique_ptr<Mover> made(new Mover(device));
  RETURN_IF_ERROR(CudaPinnedBuffer::make(device->context(), ring_bytes, &made->buffer_));
  made->piece_bytes_ = piece_bytes;
  made->ring_slots_ = static_cast<uint32_t>(ring_bytes / piece_bytes);
  made->slots_.resize(made->ring_slots_);
  for (uint32_t slot = made->ring_slots_; slot-- > 0;) made->free_ring_.push_back(slot);
  *mover = std::move(made);
  return {};
}

Status Mover::submit(Way way, uint32_t lane, std::span<const DeviceSpan> spans,
                     const CudaPinned* places, uint64_t* number) {
  const Lock lock(mutex_);
  if (batches_.size() == kBatchesMax) {
    return {Code::kBusy, std::to_string(kBatchesMax) + " batches are unfinished: wait for some"};
  }
  Batch batch;
  if (!spare_.empty()) {
    batch.spans = std::move(spare_.back());
    spare_.pop_back();
  }
  batch.spans.assign(spans.begin(), spans.end());
  batch.number = *number = next_number_++;
  batch.way = way;
  batch.lane = lane;
  if (places != nullptr) batch.places = *places;
  skip_empty(&batch);
  batches_.push_back(std::move(batch));
  moved_ = true;
  pump();
  return {};
}

Status Mover::next(int64_t timeout_ns, Piece* piece) {
  return wait_until(timeout_ns, "there is no piece", [&] { return take(piece); });
}

bool Mover::take(Piece* piece) {
  if (!arrived_.empty()) {
    *piece = slots_[arrived_.front()].piece;
    arrived_.pop_front();
    ++taken_;
    return true;
  }
  for (Batch& batch : batches_) {
    uint32_t slot = 0;
    if (batch.way != Way::kIn || batch.cut() || !take_slot(batch.in_place(), &slot)) continue;
    cut_piece(&batch, slot);
    ++batch.with_worker;
    ++taken_;
    *piece = slots_[slot].piece;
    return true;
  }
  return false;
}

bool Mover::take_slot(bool in_place, uint32_t* slot) {
  std::vector<uint32_t>& free = in_place ? free_places_ : free_ring_;
  if (in_place && free.empty() && slots_.size() < ring_slots_ + kPlacesMax) {
    free.push_back(static_cast<uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  if (free.empty()) return false;
  *slot = free.back();
  free.pop_back();
  return true;
}

void Mover::free_slot(uint32_t slot) {
  (slot < ring_slots_ ? free_ring_ : free_places_).push_back(slot);
}

void Mover::finish(const Piece& piece, const Status& status) {
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
    free_slot(piece.slot);
  }
  pump();
}

void Mover::cancel(uint64_t number, const Status& why) {
  const Lock lock(mutex_);
  Batch* const batch = find(number);
  if (batch == nullptr) return;
  moved_ = true;
  fail(batch, why);
  pump();
}

Status Mover::stream_wait(uint64_t number, uint64_t stream, int64_t timeout_ns) {
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

Status Mover::wait(uint64_t number, int64_t timeout_ns) {
  Status status;
  const auto is_finished = [&] {
    if (find(number) != nullptr) return false;
    status = report_of(number);
    return true;
  };
  RETURN_IF_ERROR(wait_until(timeout_ns, "the batch is not finished", is_finished));
  return status;
}

bool Mover::next_finished(uint64_t* batch) {
  const Lock lock(mutex_);
  if (untold_.empty()) return false;
  *batch = untold_.front();
  untold_.pop_front();
  return true;
}

Status Mover::close() {
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
Status Mover::wait_until(int64_t timeout_ns, const char* what, const Ready& ready) {
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
void Mover::pump() {
  collect_done();
  for (Batch& batch : batches_) {
    uint32_t slot = 0;
    while (batch.way == Way::kOut && !batch.cut() && take_slot(batch.in_place(), &slot)) {
      cut_piece(&batch, slot);
      give_to_device(&batch, slot);
    }
  }
  finish_batches();
  // Not otherwise: those who wait would wake one another for ever.
  if (std::exchange(moved_, false)) changed_.notify_all();
}

void Mover::collect_done() {
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
      free_slot(index);
    }
  }
}

bool Mover::is_through(Slot* slot) {
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

void Mover::skip_empty(Batch* batch) const {
  while (!batch->cut() && batch->offset == batch->spans[batch->span].bytes) {
    ++batch->span;
    batch->offset = 0;
  }
}

void Mover::cut_piece(Batch* batch, uint32_t slot) {
  const uint64_t room = batch->in_place() ? kPlaceBytes : piece_bytes_;
  Piece& piece = slots_[slot].piece;
  piece = {};
  piece.batch = batch->number;
  piece.way = batch->way;
  piece.in_place = batch->in_place();
  piece.span = static_cast<uint32_t>(batch->span);
  piece.offset = batch->offset;
  if (!piece.in_place) piece.memory = buffer_.pinned().memory + slot * piece_bytes_;
  piece.slot = slot;
  for (uint64_t used = 0; !batch->cut() && piece.spans < kPartsMax; ++piece.spans) {
    const uint64_t left = batch->spans[batch->span].bytes - batch->offset;
    // A span that does not fit begins the next piece, so that its parts are of the full size.
    if (piece.spans > 0 && used + left > room) break;
    const uint64_t part = std::min(left, room);
    piece.bytes += part;
    used += Piece::next_part(part);
    batch->offset += part;
    if (part < left) {
      ++piece.spans;
      break;
    }
    ++batch->span;
    batch->offset = 0;
  }
  skip_empty(batch);
}

void Mover::give_to_device(Batch* batch, uint32_t index) {
  Slot& slot = slots_[index];
  const Piece& piece = slot.piece;
  const CudaPinned host = piece.in_place ? batch->places : buffer_.pinned();
  std::byte* staged = piece.memory;
  uint64_t left = piece.bytes;
  parts_.clear();
  for (uint32_t i = 0; i < piece.spans; ++i) {
    const DeviceSpan& span = batch->spans[piece.span + i];
    const uint64_t offset = i == 0 ? piece.offset : 0;
    const uint64_t bytes = std::min(span.bytes - offset, left);
    std::byte* const memory = piece.in_place ? span.place + offset : staged;
    if (bytes > 0) {
      parts_.push_back({span.device + offset, static_cast<uint64_t>(memory - host.memory), bytes});
    }
    staged += Piece::next_part(bytes);
    left -= bytes;
  }
  uint64_t copy = 0;
  const Status status = batch->way == Way::kOut
                            ? device_->copy_out(batch->lane, parts_, host, &copy)
                            : device_->copy_in(batch->lane, parts_, host, &copy);
  moved_ = true;
  if (!status.ok()) fail(batch, status);
  if (copy == 0) {
    free_slot(index);
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
void Mover::fail(Batch* batch, const Status& status) {
  if (!batch->status.ok()) return;
  batch->status = status;
  batch->span = batch->spans.size();
  std::erase_if(arrived_, [&](uint32_t slot) {
    if (slots_[slot].piece.batch != batch->number) return false;
    --batch->with_worker;
    free_slot(slot);
    return true;
  });
}

void Mover::finish_batches() {
  std::erase_if(batches_, [&](Batch& batch) {
    if (!batch.cut() || batch.with_device > 0 || batch.with_worker > 0) return false;
    finished_[batch.number % kReports] = {batch.number, std::move(batch.status)};
    if (untold_.size() == kReports) untold_.pop_front();
    untold_.push_back(batch.number);
    spare_.push_back(std::move(batch.spans));
    moved_ = true;
    return true;
  });
}

Mover::Batch* Mover::find(uint64_t number) {
  const auto found = std::ranges::lower_bound(batches_, number, {}, &Batch::number);
  return found != batches_.end() && found->number == number ? &*found : nullptr;
}

Status Mover::report_of(uint64_t number) const {
  CHECK(number > 0 && number < next_number_);
  const Finished& finished = finished_[number % kReports];
  if (finished.number == number) return finished.status;
  return {Code::kInvalid, "batch " + std::to_string(number) + " is too old to be asked for"};
}

}  // namespace lightckpt
