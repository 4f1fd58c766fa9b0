// See atomic_catalog.h.
#include "atomic_catalog.h"

#include <algorithm>
#include <cstring>

namespace lightckpt {
namespace {

constexpr uint64_t kManifestAt = sizeof(Slot) + sizeof(uint32_t);  // in its page
constexpr uint64_t kManifestRoom = kPageBytes - kManifestAt;

Slot slot_in(Bytes pages, uint32_t index) {
  Slot slot;
  std::memcpy(&slot, pages.data() + index * kPageBytes, sizeof(slot));
  return slot;
}

void put_slot(std::vector<std::byte>* pages, uint32_t index, const Slot& slot) {
  std::memcpy(pages->data() + index * kPageBytes, &slot, sizeof(slot));
}

uint32_t manifest_bytes_in(Bytes pages, uint32_t index) {
  uint32_t bytes = 0;
  std::memcpy(&bytes, pages.data() + index * kPageBytes + sizeof(Slot), sizeof(bytes));
  return bytes;
}

// How a slot names the manifest that lies in a page. As a pool's offsets, these mean nothing on the
// media: whoever takes them for its own finds them in the heap.
uint64_t name_of(uint32_t index, uint32_t slot_count) { return heap_offset(slot_count + index); }

// In which pages the manifests lie that no slot names, but for `in_use`.
std::vector<uint32_t> unnamed(Bytes pages, uint64_t in_use) {
  const auto count = static_cast<uint32_t>(pages.size() / kPageBytes);
  std::vector<uint32_t> found;
  for (uint32_t index = 0; index < count; ++index) {
    const uint64_t name = name_of(index, count);
    bool stays = manifest_bytes_in(pages, index) == 0 || name == in_use;
    for (uint32_t slot = 0; slot < count && !stays; ++slot) {
      stays = slot_in(pages, slot).manifest_offset == name;
    }
    if (!stays) found.push_back(index);
  }
  return found;
}

void free_unnamed(std::vector<std::byte>* pages, uint64_t in_use) {
  for (uint32_t index : unnamed(*pages, in_use)) {
    std::byte* page = pages->data() + index * kPageBytes;
    std::memset(page + sizeof(Slot), 0, kPageBytes - sizeof(Slot));
  }
}

}  // namespace

uint64_t AtomicCatalog::orphans(const std::byte* memory, uint32_t slot_count) {
  return unnamed(Bytes(memory + slot_offset(0), slot_count * kPageBytes), 0).size();
}

std::vector<std::byte> AtomicCatalog::pages() const {
  return {memory_ + slot_offset(0), memory_ + slot_offset(slot_count_)};
}

void AtomicCatalog::change(const std::string& name, const std::vector<std::byte>& after) {
  if (on_change_) on_change_(name, slot_offset(0), after);
  std::memcpy(memory_ + slot_offset(0), after.data(), after.size());
}

Slot AtomicCatalog::line(uint32_t index) const {
  return slot_in(Bytes(memory_ + slot_offset(index), kPageBytes), 0);
}

Status AtomicCatalog::publish(uint32_t index, const Slot& slot) {
  std::vector<std::byte> after = pages();
  put_slot(&after, index, slot);
  change("publish", after);
  return {};
}

Status AtomicCatalog::retire(const std::vector<uint32_t>& indexes, uint64_t in_use) {
  std::vector<std::byte> after = pages();
  for (uint32_t index : indexes) put_slot(&after, index, {});
  free_unnamed(&after, in_use);
  change("retire", after);
  return {};
}

Status AtomicCatalog::secure() {
  if (orphans(memory_, slot_count_) == 0) return {};
  std::vector<std::byte> after = pages();
  free_unnamed(&after, 0);
  change("secure", after);
  return {};
}

Status AtomicCatalog::manifest(const Slot& slot, Bytes* bytes) const {
  for (uint32_t index = 0; index < slot_count_; ++index) {
    const uint32_t held = manifest_bytes_in(Bytes(memory_ + slot_offset(index), kPageBytes), 0);
    if (slot.manifest_offset != name_of(index, slot_count_) || held == 0) continue;
    *bytes = Bytes(memory_ + slot_offset(index) + kManifestAt, held);
    return {};
  }
  return {Code::kFormat, "its manifest in the catalog is not there"};
}

Status AtomicCatalog::put(Bytes manifest, Slot* slot) {
  CHECK(!manifest.empty() && manifest.size() <= kManifestRoom);
  RETURN_IF_ERROR(secure());
  std::vector<std::byte> after = pages();
  for (uint32_t index = 0; index < slot_count_; ++index) {
    if (manifest_bytes_in(after, index) != 0) continue;
    const auto bytes = static_cast<uint32_t>(manifest.size());
    std::byte* page = after.data() + index * kPageBytes;
    std::memcpy(page + sizeof(Slot), &bytes, sizeof(bytes));
    std::memcpy(page + kManifestAt, manifest.data(), manifest.size());
    change("put", after);
    slot->manifest_offset = name_of(index, slot_count_);
    return {};
  }
  return {Code::kNoSpace, "the catalog holds " + std::to_string(slot_count_) + " manifests"};
}

std::unique_ptr<Catalog> catalog_of(CatalogKind kind, std::byte* memory, uint32_t slot_count,
                                    AtomicCatalog::OnChange on_change) {
  if (kind == CatalogKind::kLines) return nullptr;
  return std::make_unique<AtomicCatalog>(memory, slot_count, std::move(on_change));
}

}  // namespace lightckpt
