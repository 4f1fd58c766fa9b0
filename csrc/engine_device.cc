// What workers do with pieces from devices, and with batches that have come. See engine.h.
#include <exception>
#include <utility>

#include "crc32c.h"
#include "engine.h"
#include "sigbus.h"

namespace lightckpt {

// Asks each device for a piece, and does it.
void Engine::run_poll() {
  DeviceFeed::Found found;
  bool any = false;
  try {
    any = devices_.poll(&found);
  } catch (const std::exception&) {
    draft_.fail(no_host_memory());
  }
  if (any) queue_.started(found.batch);
  hear_of_arrivals();
  queue_.polled(any);
  if (any) run_piece(found);
}

void Engine::run_piece(const DeviceFeed::Found& found) {
  Batch* const batch = found.batch;
  const bool write = batch->op == Op::kWrite;
  Status status;
  try {
    const size_t end = copy_piece(found);
    queue_.note_bytes(batch, found.piece.bytes);
    if (write) {
      const size_t begin = batch->first_of(found.piece.span) + found.piece.offset / kChunkBytes;
      draft_.note_written(*batch, begin, end, found.piece.bytes);
    }
  } catch (const std::exception&) {
    status = no_host_memory();
    if (batch->of_draft) draft_.fail(status);
  }
  devices_.give_back(found, status);
  hear_of_arrivals();
}

void Engine::hear_of_arrivals() {
  DeviceFeed::Arrival arrival;
  while (devices_.arrived(&arrival)) {
    queue_.arrive(arrival.batch, std::move(arrival.status), arrival.in_place);
  }
}

// Its turn has come: where it is a check, the writes that it is of are there.
void Engine::run_arrived(Batch* batch) {
  const bool compares = !queue_.has_failed(*batch);
  for (size_t at = 0; compares && at < batch->sums.size(); ++at) {
    const Chunk& chunk = batch->chunks[at];
    if (batch->sums[at] != batch->table[chunk.index]) queue_.note_bad(batch, chunk.extent);
  }
  complete(batch);
}

// Returns the end of the piece's chunks: they follow one another in the batch.
size_t Engine::copy_piece(const DeviceFeed::Found& found) {
  const SigbusGuard::Armed armed;
  const Piece& piece = found.piece;
  Batch* const batch = found.batch;
  size_t at = batch->first_of(piece.span) + piece.offset / kChunkBytes;
  std::byte* staged = piece.memory;
  uint64_t left = piece.bytes;
  for (uint32_t i = 0; i < piece.spans; ++i) {
    const size_t end = batch->first_of(piece.span + i + 1);
    uint64_t bytes = 0;
    for (; at < end && bytes < left; ++at) {
      std::byte* const memory = piece.in_place ? nullptr : staged + bytes;
      if (!copy_staged(batch, at, memory)) queue_.note_bad(batch, batch->chunks[at].extent);
      bytes += batch->chunks[at].bytes;
    }
    if (!piece.in_place) staged += Piece::next_part(bytes);
    left -= bytes;
  }
  fence_after(batch->op);
  return at;
}

// A chunk whose bytes are in staging, or are to be; null: the device has its place. False if they
// are not those of their checksum.
bool Engine::copy_staged(Batch* batch, size_t at, std::byte* staged) {
  const Chunk& chunk = batch->chunks[at];
  Media& media = store_->media();
  const std::byte* const stored = media.view() + chunk.offset;
  switch (batch->op) {
    case Op::kWrite:
      if (staged == nullptr) {
        // First the checksum: where flushing evicts a line, it would come back for that.
        draft_.checksum(chunk.index) = crc32c(0, stored, chunk.bytes);
        media.dma_done(chunk.offset, chunk.bytes);
      } else {
        draft_.checksum(chunk.index) = media.nt_copy_crc(chunk.offset, Bytes(staged, chunk.bytes));
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

}  // namespace lightckpt
