// Cutting spans into chunks. See batch.h.
#include "batch.h"

#include <algorithm>
#include <string>

namespace lightckpt {

Status Batch::cut(const Layout& layout, uint64_t area, std::span<const Span> spans) {
  for (const Span& span : spans) {
    if (span.extent >= layout.extent_bytes.size()) {
      return {Code::kInvalid, "extent " + std::to_string(span.extent) + " of " +
                                  std::to_string(layout.extent_bytes.size())};
    }
    firsts_.push_back(chunks.size());
    const uint64_t bytes = layout.extent_bytes[span.extent];
    if (bytes > 0 && span.memory == nullptr && op != Op::kVerify) {
      return {Code::kInvalid, "extent " + std::to_string(span.extent) + " has no memory"};
    }
    uint64_t index = layout.first_chunks[span.extent];
    for (uint64_t done = 0; done < bytes; done += kChunkBytes, ++index) {
      const auto piece = static_cast<uint32_t>(std::min(kChunkBytes, bytes - done));
      chunks.push_back({span.memory == nullptr ? nullptr : span.memory + done,
                        area + layout.extent_offsets[span.extent] + done, piece, span.extent,
                        index});
    }
  }
  if (on_device && op == Op::kCheck) sums.assign(chunks.size(), 0);
  return {};
}

// What it has allocated stays for the next one.
void Batch::clear() {
  chunks.clear();
  firsts_.clear();
  sums.clear();
  host.clear();
  of_draft = on_device = held_ = arrived_ = false;
  table = nullptr;
  next_ = remaining_ = 0;
  report_ = {};
  status_ = {};
}

}  // namespace lightckpt
