// Slots as lines of the media. See catalog.h.
#include "catalog.h"

namespace lightckpt {

Slot LineCatalog::line(uint32_t index) const {
  Slot slot;
  std::memcpy(&slot, media_.view() + slot_offset(index), sizeof(slot));
  return slot;
}

void LineCatalog::write(uint32_t index, const Slot& slot) {
  media_.store(slot_offset(index), std::as_bytes(std::span(&slot, 1)));
  media_.flush(slot_offset(index), sizeof(slot));
}

Status LineCatalog::publish(uint32_t index, const Slot& slot) {
  write(index, slot);
  return media_.drain();
}

Status LineCatalog::retire(const std::vector<uint32_t>& indexes, uint64_t) {
  for (uint32_t index : indexes) write(index, {});
  return media_.drain();
}

Status LineCatalog::secure() {
  media_.flush(slot_offset(0), heap_offset(slot_count_) - slot_offset(0));
  return media_.drain();
}

// Stored anew, and not only flushed: pages whose writing back has failed count as written.
Status LineCatalog::rewrite(const std::vector<Slot>& slots) {
  for (uint32_t index = 0; index < slots.size(); ++index) write(index, slots[index]);
  return media_.drain();
}

Status LineCatalog::manifest(const Slot& slot, Bytes* bytes) const {
  if (slot.manifest_offset > media_.size() ||
      slot.manifest_bytes > media_.size() - slot.manifest_offset) {
    return {Code::kFormat, "its manifest lies outside the store"};
  }
  if (slot.manifest_offset < heap_offset(slot_count_)) {
    return {Code::kFormat, "its manifest lies over the store's slots"};
  }
  *bytes = Bytes(media_.view() + slot.manifest_offset, slot.manifest_bytes);
  return {};
}

Status LineCatalog::put(Bytes, Slot*) { CHECK(false); }

}  // namespace lightckpt
