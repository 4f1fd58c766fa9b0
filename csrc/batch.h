// Batch: spans given to the workers as one piece of work, cut into chunks.
//
// What a batch asks for is written by who submits it and stands still from then on; workers read
// it without a lock. How far it is belongs to the queue (batch_queue.h) and is behind its mutex.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "format.h"
#include "status.h"

namespace lightckpt {

enum class Op : uint32_t { kWrite = 0, kRead, kCheck, kVerify, kCopy, kCommit };

struct Span {
  std::byte* memory;
  uint32_t extent;
  uint32_t reserved;
};

struct Report {
  uint64_t bytes = 0;
  uint64_t submit_ns = 0;
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint32_t bad_count = 0;
  std::array<uint32_t, 15> bad{};
  bool in_place = false;  // of one on a device that has come: not through the ring
};

// A piece of an extent: what one checksum covers.
struct Chunk {
  std::byte* memory;
  uint64_t offset;  // on the media
  uint32_t bytes;
  uint32_t extent;
  uint64_t index;  // in the checksum table
};

class Batch {
 public:
  // Cuts spans into chunks; consecutive extents lie one behind the other, so the media is written
  // from front to back. After an error the batch is not to be used.
  Status cut(const Layout& layout, uint64_t area, std::span<const Span> spans);
  // The chunks of a span are [first_of(span), first_of(span + 1)).
  size_t span_count() const { return firsts_.size(); }
  size_t first_of(size_t span) const {
    return span < firsts_.size() ? firsts_[span] : chunks.size();
  }

  uint64_t number = 0;  // given by the queue
  Op op = Op::kWrite;
  bool of_draft = false;   // of the version in flight
  bool on_device = false;  // its chunks come as pieces from a device
  std::vector<Chunk> chunks;
  const uint32_t* table = nullptr;  // what its chunks are compared with
  std::vector<uint32_t> sums;       // of a check on a device, as they arrive; one worker each
  std::vector<std::byte> host;      // of a commit

 private:
  friend class BatchQueue;
  void clear();

  std::vector<size_t> firsts_;

  // The queue's, behind its mutex.
  size_t next_ = 0;       // first chunk that no worker has taken
  size_t remaining_ = 0;  // chunks not finished
  bool held_ = false;     // of a commit: it may not run yet
  bool arrived_ = false;  // of a batch on a device: nothing of it is under way any more
  Report report_;
  Status status_;
};

}  // namespace lightckpt
