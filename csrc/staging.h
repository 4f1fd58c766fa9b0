// Staging: a ring of pinned pieces between a GPU and the workers that copy on to the media, or from
// it. For media that copy engines cannot reach themselves.
//
//   out:  submit -> [the device fills a piece] -> next -> the worker copies it on -> finish
//   in:   submit -> next -> the worker fills the piece -> finish -> [the device takes it]
//
// A span is cut at multiples of the piece's size from its start, so a piece is one chunk of an
// extent where the sizes are the same. A free piece is filled with what the oldest batch has next.
//
// The guard is stream_wait. Where the ring has had room for all of a batch, it only lets the
// stream wait. Where the batch is larger, it waits for the workers until the last piece has been
// given to the device: CUDA's streams wait for what has been given to them, not for what will be.
//
// Invariants:
//  1. Nothing is allocated after `make`, but for the lists of spans, which are used again.
//  2. A piece is used again when the device and the worker are through with it; also after errors.
//  3. A batch is finished when each of its pieces is, or was left out after an error: the first
//     error is the batch's.
//
// Threads: any. A worker that has a piece gives it back before the end.
#pragma once

#include <array>
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
};

// A part of a span, and the pinned memory for it.
struct StagedPiece {
  uint64_t batch;
  Way way;
  uint32_t span;    // its index in the batch
  uint64_t offset;  // in the span
  uint64_t bytes;
  std::byte* memory;
  uint32_t slot;
};

class Staging {
 public:
  static constexpr size_t kBatchesMax = 256;       // unfinished
  static constexpr size_t kReports = kBatchesMax;  // of finished ones, the newest

  // Both are kept; the device ends after it. `ring_bytes` is a multiple of `piece_bytes`.
  static Status make(CudaDevice* device, uint64_t ring_bytes, uint64_t piece_bytes,
                     std::unique_ptr<Staging>* staging);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() { (void)close(); }

  // After all that `stream` has been given. kBusy: kBatchesMax are unfinished.
  Status submit(Way way, uint64_t stream, std::span<const DeviceSpan> spans, uint64_t* batch);

  // Gives a worker a piece of any batch: filled, or to be filled. kTimeout: there was none;
  // timeout_ns < 0 waits for ever, 0 polls.
  Status next(int64_t timeout_ns, StagedPiece* piece);
  // The worker is through with it; an error of its own becomes the batch's.
  void finish(const StagedPiece& piece, const Status& status);

  // The guard, see above. After an error the stream waits for what was given to the device.
  Status stream_wait(uint64_t batch, uint64_t stream, int64_t timeout_ns);
  // Until the batch is finished: its bytes are through the workers, or on the device.
  Status wait(uint64_t batch, int64_t timeout_ns);

  // Waits for the device, as long as it takes. All pieces are back.
  Status close();

 private:
  // A slot is free, with the device (`copy` is set), or with a worker.
  struct Slot {
    StagedPiece piece;
    uint64_t copy = 0;
    uint32_t lane = 0;
    uint32_t errors = 0;  // of asking whether it is done
  };
  struct Batch {
    uint64_t number = 0;
    Way way = Way::kOut;
    uint32_t lane = 0;
    std::vector<DeviceSpan> spans;
    size_t span = 0;  // the next piece's
    uint64_t offset = 0;
    uint64_t with_worker = 0;  // pieces, those that have arrived too
    uint64_t with_device = 0;
    uint64_t last_copy = 0;  // 0: none yet
    Status status;

    bool cut() const { return span == spans.size(); }
  };
  struct Finished {
    uint64_t number = 0;
    Status status;
  };
  using Lock = std::unique_lock<std::mutex>;

  explicit Staging(CudaDevice* device) : device_(device) {}
  Batch* find(uint64_t number);
  Status report_of(uint64_t number) const;
  void skip_empty(Batch* batch) const;
  void cut_piece(Batch* batch, uint32_t slot);
  void give_to_device(Batch* batch, uint32_t slot);
  void pump();
  void collect_done();
  void fail(Batch* batch, const Status& status);
  void finish_batches();
  bool is_through(Slot* slot);
  bool take(StagedPiece* piece);
  template <typename Ready>
  Status wait_until(int64_t timeout_ns, const char* what, const Ready& ready);

  CudaDevice* device_;
  CudaPinnedBuffer buffer_;
  uint64_t piece_bytes_ = 0;

  std::mutex mutex_;  // guards everything below; taken before the device's
  std::condition_variable changed_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::deque<uint32_t> with_device_;  // in the order in which they were given
  std::deque<uint32_t> arrived_;      // filled, for workers
  uint64_t taken_ = 0;                // pieces that workers have
  bool moved_ = false;                // something that others may wait for
  std::deque<Batch> batches_;         // unfinished, oldest first
  std::vector<std::vector<DeviceSpan>> spare_;
  std::array<Finished, kReports> finished_;
  uint64_t next_number_ = 1;
};

}  // namespace lightckpt
