// Mover: pieces of batches on their way between a GPU and the workers that copy on to the media, or
// from it.
//
//   out:  submit -> [the device fills a piece] -> next -> the worker copies it on -> finish
//   in:   submit -> next -> the worker fills the piece -> finish -> [the device takes it]
//
// The memory of a piece is staging: a slot of a ring of pinned memory, for media that copy engines
// cannot reach themselves. Or the batch has places: registered memory, the media's own, where the
// device writes and reads what it should; then workers only check it, and flush it.
//
// A span is cut at multiples of the piece's size from its start, so pieces are whole chunks of an
// extent if that size is. Small spans share a piece: there is one event for all of them. A free
// slot is filled with what the oldest batch has next.
//
// The guard is stream_wait. Where there were slots for all of a batch, it only lets the stream
// wait. Where the batch is larger, it waits for the workers until the last piece has been given to
// the device: CUDA's streams wait for what has been given to them, not for what will be.
//
// Invariants:
//  1. Nothing is allocated in steady state: lists of spans and slots without memory are used again.
//  2. A piece is used again when the device and the worker are through with it; also after errors.
//  3. A batch is finished when each of its pieces is, or was left out after an error: the first
//     error is the batch's.
//
// Threads: any. A worker that has a piece gives it back before the end.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "device_cuda.h"
#include "status.h"

namespace lightckpt {

enum class Way : uint32_t { kOut = 0, kIn };

struct DeviceSpan {
  CudaPointer device;
  uint64_t bytes;
  std::byte* place = nullptr;  // in a batch with places
};

// A part of a span, and whole spans that follow it.
struct Piece {
  uint64_t batch;
  Way way;
  bool in_place;
  uint32_t span;      // the first, by its index in the batch
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
  static constexpr size_t kBatchesMax = 2048;        // unfinished
  static constexpr size_t kReports = kBatchesMax;    // of finished ones, the newest
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
  // null: through the ring. kBusy: kBatchesMax are unfinished.
  Status submit(Way way, uint32_t lane, std::span<const DeviceSpan> spans, const CudaPinned* places,
                uint64_t* batch);

  // Gives a worker a piece of any batch: filled, or to be filled. kTimeout: there was none;
  // timeout_ns < 0 waits for ever, 0 polls.
  Status next(int64_t timeout_ns, Piece* piece);
  // The worker is through with it; an error of its own becomes the batch's.
  void finish(const Piece& piece, const Status& status);
  // Leaves out what the device has not been given yet. The batch is finished when the rest is.
  void cancel(uint64_t batch, const Status& why);

  // The guard, see above. After an error the stream waits for what was given to the device.
  Status stream_wait(uint64_t batch, uint64_t stream, int64_t timeout_ns);
  // Until the batch is finished: its bytes are through the workers, or on the device.
  Status wait(uint64_t batch, int64_t timeout_ns);
  // Tells of each batch that has been finished, once.
  bool next_finished(uint64_t* batch);

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
  struct Batch {
    uint64_t number = 0;
    Way way = Way::kOut;
    uint32_t lane = 0;
    CudaPinned places;  // without memory: through the ring
    std::vector<DeviceSpan> spans;
    size_t span = 0;  // the next piece's
    uint64_t offset = 0;
    uint64_t with_worker = 0;  // pieces, those that have arrived too
    uint64_t with_device = 0;
    uint64_t last_copy = 0;  // 0: none yet
    Status status;

    bool in_place() const { return places.memory != nullptr; }
    bool cut() const { return span == spans.size(); }
  };
  struct Finished {
    uint64_t number = 0;
    Status status;
  };
  using Lock = std::unique_lock<std::mutex>;

  explicit Mover(CudaDevice* device) : device_(device), finished_(kReports) {}
  Batch* find(uint64_t number);
  Status report_of(uint64_t number) const;
  bool take_slot(bool in_place, uint32_t* slot);
  void free_slot(uint32_t slot);
  void skip_empty(Batch* batch) const;
  void cut_piece(Batch* batch, uint32_t slot);
  void give_to_device(Batch* batch, uint32_t slot);
  void pump();
  void collect_done();
  void fail(Batch* batch, const Status& status);
  void finish_batches();
  bool is_through(Slot* slot);
  bool take(Piece* piece);
  template <typename Ready>
  Status wait_until(int64_t timeout_ns, const char* what, const Ready& ready);

  CudaDevice* device_;
  CudaPinnedBuffer buffer_;
  uint64_t piece_bytes_ = 0;

  std::mutex mutex_;  // guards everything below; taken before the device's
  std::condition_variable changed_;
  std::vector<Slot> slots_;
  uint32_t ring_slots_ = 0;
  std::vector<uint32_t> free_ring_;
  std::vector<uint32_t> free_places_;
  std::deque<uint32_t> with_device_;  // in the order in which they were given
  std::deque<uint32_t> arrived_;      // filled, for workers
  uint64_t taken_ = 0;                // pieces that workers have
  bool moved_ = false;                // something that others may wait for
  std::deque<Batch> batches_;         // unfinished, oldest first
  std::vector<std::vector<DeviceSpan>> spare_;
  std::vector<CudaSpan> parts_;  // of the piece that is given
  std::vector<Finished> finished_;
  std::deque<uint64_t> untold_;  // finished ones; the newest kReports
  uint64_t next_number_ = 1;
};

}  // namespace lightckpt
