// Allocation without metadata of its own: what is used is derived from what valid slots reach.
//
// So it cannot leak or disagree with the versions: opening a store after any crash finds exactly
// the free space there is. First fit from the front, which makes keep + 1 areas of one size take
// turns in the same places. Pure; knows no media.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "media.h"

namespace lightckpt {

class Allocator {
 public:
  // Space to hand out is [begin, end).
  Allocator(uint64_t begin, uint64_t end) : begin_(begin), end_(end) {}

  void use(uint64_t offset, uint64_t bytes) { used_.add(offset, offset + bytes); }

  // Finds and takes a free range, or nothing where none is large enough.
  std::optional<uint64_t> take(uint64_t bytes, uint64_t align);

  // The end that the space must have for take(bytes, align) to succeed.
  uint64_t end_needed(uint64_t bytes, uint64_t align) const;
  void extend(uint64_t end) { end_ = std::max(end_, end); }
  uint64_t free_bytes() const;

 private:
  uint64_t begin_;
  uint64_t end_;
  RangeSet used_;
};

}  // namespace lightckpt
