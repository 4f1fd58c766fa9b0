// Cutting pieces, and giving them to the device. See mover.h.
#include <algorithm>
#include <exception>

#include "mover.h"

namespace lightckpt {

void Mover::skip_empty(Move* move) const {
  while (!move->cut() && move->offset == move->spans[move->span].bytes) {
    ++move->span;
    move->offset = 0;
  }
}

void Mover::cut_piece(Move* move, uint32_t slot) {
  const uint64_t room = move->in_place() ? kPlaceBytes : piece_bytes_;
  Piece& piece = slots_[slot].piece;
  piece = {};
  piece.move = move->number;
  piece.way = move->way;
  piece.in_place = move->in_place();
  piece.span = static_cast<uint32_t>(move->span);
  piece.offset = move->offset;
  if (!piece.in_place) piece.memory = buffer_.pinned().memory + slot * piece_bytes_;
  piece.slot = slot;
  for (uint64_t used = 0; !move->cut() && piece.spans < kPartsMax; ++piece.spans) {
    const uint64_t left = move->spans[move->span].bytes - move->offset;
    // A span that does not fit begins the next piece, so that its parts are of the full size.
    if (piece.spans > 0 && used + left > room) break;
    const uint64_t part = std::min(left, room);
    piece.bytes += part;
    used += Piece::next_part(part);
    move->offset += part;
    if (part < left) {
      ++piece.spans;
      break;
    }
    ++move->span;
    move->offset = 0;
  }
  skip_empty(move);
}

void Mover::give_to_device(Move* move, uint32_t index) {
  Slot& slot = slots_[index];
  const Piece& piece = slot.piece;
  const CudaPinned host = piece.in_place ? move->places : buffer_.pinned();
  std::byte* staged = piece.memory;
  uint64_t left = piece.bytes;
  parts_.clear();
  for (uint32_t i = 0; i < piece.spans; ++i) {
    const DeviceSpan& span = move->spans[piece.span + i];
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
  Status status;
  try {
    status = move->way == Way::kOut ? device_->copy_out(move->lane, parts_, host, &copy)
                                    : device_->copy_in(move->lane, parts_, host, &copy);
  } catch (const std::exception&) {
    status = no_host_memory();
  }
  moved_ = true;
  if (!status.ok()) fail(move, status);
  if (copy == 0) {
    free_slot(index);
    return;
  }
  slot.copy = copy;
  slot.errors = 0;
  slot.lane = move->lane;
  ++move->with_device;
  with_device_.push_back(index);
  move->last_copy = copy;
}

}  // namespace lightckpt
