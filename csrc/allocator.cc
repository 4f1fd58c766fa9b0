// First fit over the gaps between used ranges.
#include "allocator.h"

namespace lightckpt {
namespace {

uint64_t aligned(uint64_t offset, uint64_t align) { return (offset + align - 1) / align * align; }

}  // namespace

std::optional<uint64_t> Allocator::take(uint64_t bytes, uint64_t align) {
  uint64_t candidate = aligned(begin_, align);
  for (const auto& [begin, end] : used_.ranges()) {
    if (candidate + bytes <= begin) break;
    candidate = std::max(candidate, aligned(end, align));
  }
  if (candidate + bytes > end_) return std::nullopt;
  use(candidate, bytes);
  return candidate;
}

uint64_t Allocator::end_needed(uint64_t bytes, uint64_t align) const {
  // Behind the last used byte: gaps before it were too small, or take would have found them.
  const auto& ranges = used_.ranges();
  const uint64_t last = ranges.empty() ? begin_ : std::max(begin_, ranges.rbegin()->second);
  return aligned(last, align) + bytes;
}

uint64_t Allocator::free_bytes() const {
  uint64_t used = 0;
  for (const auto& [begin, end] : used_.ranges()) {
    used += std::clamp(end, begin_, end_) - std::clamp(begin, begin_, end_);
  }
  return end_ - begin_ - used;
}

}  // namespace lightckpt
