// Extents as they lie in a reader's memory, which he may write to. See store.h.
//
// Pages that he has written to are his own from then on, and do not show the store any more. When
// another version lies there, that must not be taken for its bytes: so what is located belongs to
// one version, and to one time that it is pinned.
#include <algorithm>

#include "store.h"

namespace lightckpt {
namespace {

bool overlap(const Version& a, const Version& b) {
  return a.slot.record_offset < b.slot.record_offset + b.layout->area_bytes &&
         b.slot.record_offset < a.slot.record_offset + a.layout->area_bytes;
}

// Not by generation: a rebase gives a version another, and leaves it where it is.
bool is_same(const Version& a, const Version& b) {
  return a.slot.version == b.slot.version && a.slot.record_offset == b.slot.record_offset &&
         a.slot.record_crc == b.slot.record_crc;
}

}  // namespace

Status Store::locate(uint64_t number, uint32_t extent, std::span<std::byte>* bytes) {
  Version found;
  RETURN_IF_ERROR(find(number, &found));
  const Layout& layout = *found.layout;
  if (extent >= layout.extent_bytes.size()) {
    return {Code::kInvalid, "extent " + std::to_string(extent) + " of " +
                                std::to_string(layout.extent_bytes.size())};
  }
  std::byte* const area = media_->private_view() + found.slot.record_offset;
  *bytes = {area + layout.extent_offsets[extent], layout.extent_bytes[extent]};
  if (!read_only_) return media_->check();
  const MutexLock lock(mutex_);
  const auto known = [&](const Version& lent) { return is_same(lent, found); };
  if (!std::ranges::any_of(lent_, known)) {
    forget_private(found);
    lent_.push_back(std::move(found));
  }
  return media_->check();
}

// A media that is gone shows zeros, whose checksum is wrong: that is not what is to be told.
Status Store::read_record(const Version& version, const uint32_t** table, Bytes* host) {
  const Status status = decode_record(*media_, version.slot, *version.layout, table, host);
  if (!status.ok()) RETURN_IF_ERROR(media_->check());
  return status;
}

// Extents share pages, so it is the area that counts, whichever slot names it.
bool Store::has_pin_on(const Version& version) const {
  const MutexLock lock(mutex_);
  return std::ranges::any_of(versions_, [&](const Version& other) {
    return other.slot.record_offset == version.slot.record_offset && lock_.pinned_here(other.index);
  });
}

// With the mutex held.
void Store::forget_private(const Version& version) {
  const auto is_over = [&](const Version& lent) { return overlap(lent, version); };
  for (const Version& lent : lent_) {
    if (is_over(lent)) media_->forget_private(lent.slot.record_offset, lent.layout->area_bytes);
  }
  std::erase_if(lent_, is_over);
}

}  // namespace lightckpt
