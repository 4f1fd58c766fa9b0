// Handing pieces round, and counting them. See mover.h.
#include "mover.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace lightckpt {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

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
  {
    MutexLock lock(made->mutex_);
    // For as much as there can be.
    const size_t slots_max = made->ring_slots_ + kPlacesMax;
    made->slots_.reserve(slots_max);
    made->free_ring_.reserve(made->ring_slots_);
    made->free_places_.reserve(kPlacesMax);
    made->with_device_.reserve(slots_max);
    made->arrived_.reserve(slots_max);
    made->spare_.reserve(kMovesMax);
    made->parts_.reserve(kPartsMax);
    made->untold_.reserve(kReports);
    made->slots_.resize(made->ring_slots_);
    for (uint32_t slot = made->ring_slots_; slot-- > 0;) made->free_ring_.push_back(slot);
  }
  *mover = std::move(made);
  return {};
}

Status Mover::submit(Way way, uint32_t lane, std::span<const DeviceSpan> spans,
                     const CudaPinned* places, std::span<const CudaPair> aside, uint64_t* number) {
  MutexLock lock(mutex_);
  if (moves_.size() == kMovesMax) {
    return {Code::kBusy, std::to_string(kMovesMax) + " moves are unfinished: wait for some"};
  }
  try {
    Move& move = moves_.emplace_back();
    if (!spare_.empty()) move.spans.swap(spare_.back());
    move.spans.assign(spans.begin(), spans.end());
  } catch (const std::exception&) {
    if (!moves_.empty() && moves_.back().number == 0) moves_.pop_back();
    throw;
  }
  if (!spare_.empty()) spare_.pop_back();
  Move& move = moves_.back();
  move.number = next_number_++;
  move.way = way;
  move.lane = lane;
  if (places != nullptr) move.places = *places;
  if (Status status = begin_aside(&move, aside); !status.ok()) {
    moves_.pop_back();
    return status;
  }
  *number = move.number;
  skip_empty(&move);
  moved_ = true;
  pump();
  return {};
}

// An error where some of it is under way is the move's, which is finished when that is done.
Status Mover::begin_aside(Move* move, std::span<const CudaPair> pairs) {
  if (pairs.empty()) return {};
  Status status;
  try {
    status = device_->copy_aside(move->lane, pairs, &move->aside);
  } catch (const std::exception&) {
    status = no_host_memory();
  }
  if (status.ok() || move->aside == 0) return status;
  fail(move, status);
  return {};
}

Status Mover::next(int64_t timeout_ns, Piece* piece) {
  const Deadline deadline(timeout_ns);
  nanoseconds pause = kPauseMin;
  MutexLock lock(mutex_);
  while (true) {
    pump();
    if (take(piece)) return {};
    if (deadline.passed()) return {Code::kTimeout, "no piece yet"};  // so short: no memory
    rest(lock, deadline, &pause);
  }
}

bool Mover::take(Piece* piece) {
  if (!arrived_.empty()) {
    *piece = slots_[arrived_.front()].piece;
    arrived_.erase(arrived_.begin());
    ++taken_;
    return true;
  }
  for (Move& move : moves_) {
    uint32_t slot = 0;
    if (move.way != Way::kIn || move.cut() || !take_slot(move.in_place(), &slot)) continue;
    cut_piece(&move, slot);
    ++move.with_worker;
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
  MutexLock lock(mutex_);
  Move* const move = find(piece.move);
  CHECK(move != nullptr && move->with_worker > 0 && taken_ > 0);
  --move->with_worker;
  --taken_;
  moved_ = true;
  if (!status.ok()) fail(move, status);
  if (piece.way == Way::kIn && move->status.ok()) {
    give_to_device(move, piece.slot);
  } else {
    free_slot(piece.slot);
  }
  pump();
}

void Mover::cancel(uint64_t number, const Status& why) {
  MutexLock lock(mutex_);
  Move* const move = find(number);
  if (move == nullptr) return;
  moved_ = true;
  fail(move, why);
  pump();
}

Status Mover::stream_wait(uint64_t number, uint64_t stream, int64_t timeout_ns) {
  const Deadline deadline(timeout_ns);
  nanoseconds pause = kPauseMin;
  Status status;
  uint64_t last = 0;
  {
    MutexLock lock(mutex_);
    while (true) {
      pump();
      const Move* const move = find(number);
      if (move == nullptr) return report_of(number);
      status = move->status;
      last = move->aside != 0 ? move->aside : move->last_copy;
      if (move->aside != 0) break;
      if (move->cut() && (move->way == Way::kOut || move->with_worker == 0)) break;
      if (deadline.passed()) {
        return {Code::kTimeout, "not all pieces are with the device " + deadline.after()};
      }
      rest(lock, deadline, &pause);
    }
  }
  if (last == 0) return status;
  const Status ordered = device_->stream_wait(last, stream);
  return status.ok() ? ordered : status;
}

Status Mover::wait(uint64_t number, int64_t timeout_ns) {
  const Deadline deadline(timeout_ns);
  nanoseconds pause = kPauseMin;
  MutexLock lock(mutex_);
  while (true) {
    pump();
    if (find(number) == nullptr) return report_of(number);
    if (deadline.passed()) return {Code::kTimeout, "the move is not finished " + deadline.after()};
    rest(lock, deadline, &pause);
  }
}

bool Mover::next_finished(uint64_t* move) {
  MutexLock lock(mutex_);
  if (untold_.empty()) return false;
  *move = untold_.front();
  untold_.erase(untold_.begin());
  return true;
}

Status Mover::close() {
  MutexLock lock(mutex_);
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
  moves_.clear();
  keep_first(buffer_.reset());
  return status;
}

// Between, pieces go round: whoever waits sees to that.
void Mover::rest(MutexLock& lock, const Deadline& deadline, nanoseconds* pause) {
  changed_.wait_for(lock, std::min(*pause, deadline.left()));
  *pause = std::min<nanoseconds>(*pause * 2, kPauseMax);
}

// Takes back what the device is through with, and gives it what fits.
void Mover::pump() {
  collect_done();
  for (Move& move : moves_) {
    uint32_t slot = 0;
    while (move.way == Way::kOut && !move.cut() && take_slot(move.in_place(), &slot)) {
      cut_piece(&move, slot);
      give_to_device(&move, slot);
    }
  }
  finish_moves();
  // Not otherwise: those who wait would wake one another for ever.
  if (std::exchange(moved_, false)) changed_.notify_all();
}

void Mover::collect_done() {
  uint64_t waiting = 0;  // lanes whose first piece is not done: the others on it are not either
  size_t kept = 0;
  for (size_t i = 0; i < with_device_.size(); ++i) {
    const uint32_t index = with_device_[i];
    Slot& slot = slots_[index];
    const uint64_t lane = uint64_t{1} << (slot.lane % 64);
    Move* const move = find(slot.piece.move);
    if ((waiting & lane) != 0 || !is_through(move, slot.copy, &slot.errors)) {
      waiting |= lane;
      with_device_[kept++] = index;
      continue;
    }
    --move->with_device;
    moved_ = true;
    if (move->way == Way::kOut && move->status.ok()) {
      ++move->with_worker;
      arrived_.push_back(index);
    } else {
      free_slot(index);
    }
  }
  with_device_.resize(kept);
}

bool Mover::is_through(Move* move, uint64_t copy, uint32_t* errors) {
  bool done = false;
  Status status;
  try {
    status = device_->done(copy, &done);
  } catch (const std::exception&) {
    return false;  // no memory for a message: that says nothing of the copy
  }
  if (status.ok()) {
    *errors = 0;
    return done;
  }
  fail(move, status);
  // One error may be of what others did, and the copy still under way. Two in a row: the context is
  // lost, and nothing is under way.
  return ++*errors >= 2;
}

// What is left of it is left out, and pieces that no worker has taken are free.
void Mover::fail(Move* move, const Status& status) {
  if (!move->status.ok()) return;
  try {
    move->status = status;
  } catch (const std::exception&) {
    move->status = no_host_memory();
  }
  move->span = move->spans.size();
  size_t kept = 0;
  for (size_t i = 0; i < arrived_.size(); ++i) {
    const uint32_t slot = arrived_[i];
    if (slots_[slot].piece.move != move->number) {
      arrived_[kept++] = slot;
      continue;
    }
    --move->with_worker;
    free_slot(slot);
  }
  arrived_.resize(kept);
}

// Pieces come after the copy aside, on the same lane: where none is left out, it is done as well.
bool Mover::is_going_aside(Move* move) {
  if (move->aside == 0 || move->status.ok()) return false;
  return !is_through(move, move->aside, &move->aside_errors);
}

void Mover::finish_moves() {
  for (auto move = moves_.begin(); move != moves_.end();) {
    if (!move->cut() || move->with_device > 0 || move->with_worker > 0 || is_going_aside(&*move)) {
      ++move;
      continue;
    }
    finished_[move->number % kReports] = {move->number, std::move(move->status)};
    if (untold_.size() == kReports) untold_.erase(untold_.begin());
    untold_.push_back(move->number);
    if (spare_.size() < kMovesMax) spare_.push_back(std::move(move->spans));
    moved_ = true;
    move = moves_.erase(move);
  }
}

Mover::Move* Mover::find(uint64_t number) {
  const auto found = std::ranges::lower_bound(moves_, number, {}, &Move::number);
  return found != moves_.end() && found->number == number ? &*found : nullptr;
}

Status Mover::report_of(uint64_t number) const {
  CHECK(number > 0 && number < next_number_);
  const Finished& finished = finished_[number % kReports];
  if (finished.number == number) return finished.status;
  return {Code::kInvalid, "move " + std::to_string(number) + " is too old to be asked for"};
}

}  // namespace lightckpt
