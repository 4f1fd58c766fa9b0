// Mover: moves between a GPU and the workers that copy on to the media, or from it; in pieces. A
// move is what of one batch lies on one GPU.
//
//   out:  submit -> [the device fills a piece] -> next -> the worker copies it on -> finish
//   in:   submit -> next -> the worker fills the piece -> finish -> [the device takes it]
//
// The memory of a piece is staging: a slot of a ring of pinned memory, for media that copy engines
// cannot reach themselves. Or the move has places: registered memory, the media's own, where the
// device writes and reads what it should; then workers only check it, and flush it.
//
// A move may go aside: all of it is copied to other memory of the device first, and the pieces are
// cut from there.
//
// A span is cut at multiples of the piece's size from its start, so pieces are whole chunks of an
// extent if that size is. Small spans share a piece: there is one event for all of them. A free
// slot is filled with what the oldest move has next.
//
// The guard is stream_wait. Where there were slots for all of a move, or it went aside, it only
// lets the stream wait. Where the move is larger, it waits for the workers until the last piece has
// been given to the device: CUDA's streams wait for what has been given to them, not for what will
// be.
//
// Invariants:
//  1. Nothing is allocated in steady state: lists of spans and slots without memory are used again.
//     What workers call allocates nothing at all but for messages, and nothing that is thrown there
//     leaves a piece behind.
//  2. A piece is used again when the device and the worker are through with it; also after errors.
//  3. A move is finished when each of its pieces is, or was left out after an error, and its copy
//     aside is done: nothing reads or writes its memory then. The first error is the move's.
//
// Threads: any. A worker that has a piece gives it back before the end. The device's mutex is taken
// under the mover's.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "deadline.h"
#include "device_cuda.h"
#include "status.h"
#include "thread_annotations.h"

namespace lightckpt {

enum class Way : uint32_t { kOut = 0, kIn };

struct DeviceSpan {
  CudaPointer device;
  uint64_t bytes;
  std::byte* place = nullptr;  // in a move with places
};

// A part of a span, and whole spans that follow it.
struct Piece {
  uint64_t move;
  Way way;
  bool in_place;
  uint32_t span;      // the first, by its index in the move
  uint32_t spans;     // how many
  uint64_t offset;    // in the first
  uint64_t bytes;     // of all
  std::byte* memory;  // of the first; of the others see `next_part`. Null if in place
  uint32_t slot;

  // Where a slot has the part behind one of `bytes`, counted from that one.
  static constexpr uint64_t next_part(uint64_t part_bytes) { return (part_bytes + 63) / 64 * 64; }
};

class Mover {
 public:
  static constexpr size_t kMovesMax = 2048;          // unfinished
  static constexpr size_t kReports = kMovesMax;      // of finished ones, the newest
  static constexpr uint64_t kPlaceBytes = 16 << 20;  // a piece in place is not larger
  static constexpr size_t kPlacesMax = 2048;         // pieces in place, at once
  static constexpr uint32_t kPartsMax = 128;         // spans in one piece

  // Both are kept; the device ends after it. `ring_bytes` is a multiple of `piece_bytes`.
  static Status make(CudaDevice* device, uint64_t ring_bytes, uint64_t piece_bytes,
                     std::unique_ptr<Mover>* mover);
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;
  ~Mover() { (void)close(); }

  // On a lane of the device, after all that it has been given. `places` has all the spans' places;
  // null: through the ring. `aside` is what is copied first, to where the spans are; empty:
  // nothing. kBusy: kMovesMax are unfinished. After an error nothing is under way.
  Status submit(Way way, uint32_t lane, std::span<const DeviceSpan> spans, const CudaPinned* places,
                std::span<const CudaPair> aside, uint64_t* move);

  // Gives a worker a piece of any move: filled, or to be filled. kTimeout: there was none;
  // timeout_ns < 0 waits for ever, 0 polls.
  Status next(int64_t timeout_ns, Piece* piece);
  // The worker is through with it; an error of its own becomes the move's.
  void finish(const Piece& piece, const Status& status);
  // Leaves out what the device has not been given yet. The move is finished when the rest is.
  void cancel(uint64_t move, const Status& why);

  // The guard, see above. After an error the stream waits for what was given to the device.
  Status stream_wait(uint64_t move, uint64_t stream, int64_t timeout_ns);
  // Until the move is finished: its bytes are through the workers, or on the device.
  Status wait(uint64_t move, int64_t timeout_ns);
  // Tells of each move that has been finished, once.
  bool next_finished(uint64_t* move);

  // Waits for the device, as long as it takes. All pieces are back.
  Status close();

 private:
  // A slot is free, with the device (`copy` is set), or with a worker. The ring's come first.
  struct Slot {
    Piece piece;
    uint64_t copy = 0;
    uint32_t lane = 0;
    uint32_t errors = 0;  // of asking whether it is done
  };
  struct Move {
    uint64_t number = 0;
    Way way = Way::kOut;
    uint32_t lane = 0;
    CudaPinned places;  // without memory: through the ring
    std::vector<DeviceSpan> spans;
    size_t span = 0;  // the next piece's
    uint64_t offset = 0;
    uint64_t with_worker = 0;  // pieces, those that have arrived too
    uint64_t with_device = 0;
    uint64_t last_copy = 0;     // 0: none yet
    uint64_t aside = 0;         // the copy aside; 0: none
    uint32_t aside_errors = 0;  // of asking whether it is done
    Status status;

    bool in_place() const { return places.memory != nullptr; }
    bool cut() const { return span == spans.size(); }
  };
  struct Finished {
    uint64_t number = 0;
    Status status;
  };

  explicit Mover(CudaDevice* device) : device_(device), finished_(kReports) {}
  Move* find(uint64_t number) REQUIRES(mutex_);
  Status report_of(uint64_t number) const REQUIRES(mutex_);
  bool take_slot(bool in_place, uint32_t* slot) REQUIRES(mutex_);
  void free_slot(uint32_t slot) REQUIRES(mutex_);
  void skip_empty(Move* move) const REQUIRES(mutex_);
  void cut_piece(Move* move, uint32_t slot) REQUIRES(mutex_);
  void give_to_device(Move* move, uint32_t slot) REQUIRES(mutex_);
  void pump() REQUIRES(mutex_);
  void collect_done() REQUIRES(mutex_);
  void fail(Move* move, const Status& status) REQUIRES(mutex_);
  void finish_moves() REQUIRES(mutex_);
  Status begin_aside(Move* move, std::span<const CudaPair> pairs) REQUIRES(mutex_);
  bool is_going_aside(Move* move) REQUIRES(mutex_);
  bool is_through(Move* move, uint64_t copy, uint32_t* errors) REQUIRES(mutex_);
  bool take(Piece* piece) REQUIRES(mutex_);
  void rest(MutexLock& lock, const Deadline& deadline, std::chrono::nanoseconds* pause)
      REQUIRES(mutex_);

  CudaDevice* const device_;
  CudaPinnedBuffer buffer_;  // these three stand still from `make` on
  uint64_t piece_bytes_ = 0;
  uint32_t ring_slots_ = 0;

  Mutex mutex_;
  CondVar changed_;
  std::vector<Slot> slots_ GUARDED_BY(mutex_);
  std::vector<uint32_t> free_ring_ GUARDED_BY(mutex_);
  std::vector<uint32_t> free_places_ GUARDED_BY(mutex_);
  std::vector<uint32_t> with_device_ GUARDED_BY(mutex_);  // in the order in which they were given
  std::vector<uint32_t> arrived_ GUARDED_BY(mutex_);      // filled, for workers
  uint64_t taken_ GUARDED_BY(mutex_) = 0;                 // pieces that workers have
  bool moved_ GUARDED_BY(mutex_) = false;                 // something that others may wait for
  std::deque<Move> moves_ GUARDED_BY(mutex_);             // unfinished, oldest first
  std::vector<std::vector<DeviceSpan>> spare_ GUARDED_BY(mutex_);
  std::vector<CudaSpan> parts_ GUARDED_BY(mutex_);  // of the piece that is given
  std::vector<Finished> finished_ GUARDED_BY(mutex_);
  std::vector<uint64_t> untold_ GUARDED_BY(mutex_);  // finished ones; the newest kReports
  uint64_t next_number_ GUARDED_BY(mutex_) = 1;
};

}  // namespace lightckpt
