// Stores as bytes: their short form, versions planted in them, and their checksums. See image.h.
#include "image.h"

#include <algorithm>

#include "crc32c.h"

namespace lightckpt::fuzz {
namespace {

constexpr uint64_t kHeadBytes = 3 + kActions;
constexpr uint64_t kGapBytes = 8;  // so many zeros end a part: they cost more than a new one
constexpr uint64_t kPartMax = UINT16_MAX;
constexpr uint64_t kTailUnit = 16;

bool inside(const Buffer& image, uint64_t offset, uint64_t bytes) {
  return offset <= image.size() && bytes <= image.size() - offset;
}

uint32_t sum(const Buffer& image, uint64_t offset, uint64_t bytes, uint32_t otherwise) {
  return inside(image, offset, bytes) ? crc32c(0, image.data() + offset, bytes) : otherwise;
}

template <typename Plain>
void append(Buffer* bytes, const Plain& value) {
  const Bytes plain = std::as_bytes(std::span(&value, 1));
  bytes->insert(bytes->end(), plain.begin(), plain.end());
}

uint32_t slots_of(const Buffer& image) {
  const uint64_t pages = image.size() / kPageBytes;
  const uint64_t fit = pages > 1 ? pages - 1 : 0;
  const uint64_t said = get<Header>(image, 0).slot_count;
  return static_cast<uint32_t>(std::min({fit, said, uint64_t{kSlotsMax}}));
}

// The layout that a manifest's table describes, if its parts lie in the image.
bool layout_at(const Buffer& image, const Slot& slot, Layout* layout) {
  const auto head = get<ManifestHead>(image, slot.manifest_offset);
  const uint64_t table = slot.manifest_offset + sizeof(head);
  if (!inside(image, slot.manifest_offset, sizeof(head)) ||
      !inside(image, table, uint64_t{head.extent_count} * 8) ||
      head.record_capacity > image.size()) {
    return false;
  }
  std::vector<uint64_t> extents(head.extent_count);
  uint64_t left = image.size();
  for (size_t i = 0; i < extents.size(); ++i) {
    extents[i] = get<uint64_t>(image, table + i * 8);
    if (extents[i] > left) return false;
    left -= extents[i];
  }
  *layout = Layout::of(std::move(extents), head.record_capacity);
  return true;
}

void repair_manifest(Buffer* image, const Slot& slot, uint32_t repairs) {
  auto head = get<ManifestHead>(*image, slot.manifest_offset);
  Layout layout;
  if (!layout_at(*image, slot, &layout)) return;
  if (repairs & kIds) head.store_id = slot.store_id;
  if (repairs & kManifestHead) {
    head.area_bytes = layout.area_bytes;
    const uint64_t front = sizeof(head) + uint64_t{head.extent_count} * 8;
    head.blob_bytes = slot.manifest_bytes > front ? slot.manifest_bytes - front : 0;
  }
  put(image, slot.manifest_offset, head);
}

void repair_record(Buffer* image, const Slot& slot, uint32_t repairs) {
  auto head = get<RecordHead>(*image, slot.record_offset);
  Layout layout;
  if (!layout_at(*image, slot, &layout)) return;
  if (repairs & kIds) head.store_id = slot.store_id;
  if (repairs & kRecordHead) {
    head.step = slot.step;
    head.chunk_count = static_cast<uint32_t>(layout.chunk_count);
    const uint64_t front = record_table_end(layout.chunk_count);
    head.host_bytes = slot.record_bytes > front ? slot.record_bytes - front : 0;
  }
  put(image, slot.record_offset, head);
  if (!(repairs & kChunkSums)) return;
  for (size_t i = 0; i < layout.extent_bytes.size(); ++i) {
    const uint64_t begin = slot.record_offset + layout.extent_offsets[i];
    for (uint64_t at = 0; at < layout.extent_bytes[i]; at += kChunkBytes) {
      const uint64_t bytes = std::min(kChunkBytes, layout.extent_bytes[i] - at);
      const uint64_t place = layout.first_chunks[i] + at / kChunkBytes;
      put(image, slot.record_offset + sizeof(RecordHead) + place * 4,
          sum(*image, begin + at, bytes, 0));
    }
  }
}

}  // namespace

Input decode_input(Bytes bytes) {
  std::array<uint8_t, kHeadBytes> head = {};
  std::copy_n(reinterpret_cast<const uint8_t*>(bytes.data()),
              std::min<uint64_t>(bytes.size(), kHeadBytes), head.begin());
  Input input;
  input.image.resize((1 + head[0] % kPagesMax) * kPageBytes + head[1] * kTailUnit);
  input.keep = head[2];
  std::copy_n(head.begin() + 3, kActions, input.actions.begin());
  uint64_t at = kHeadBytes;
  while (at + 6 <= bytes.size()) {
    uint32_t offset = 0;
    uint16_t count = 0;
    std::memcpy(&offset, bytes.data() + at, 4);
    std::memcpy(&count, bytes.data() + at + 4, 2);
    at += 6;
    const uint64_t left = std::min<uint64_t>(count, bytes.size() - at);
    put_bytes(&input.image, offset % input.image.size(), bytes.subspan(at, left));
    at += left;
  }
  return input;
}

Buffer encode_input(const Input& input) {
  const Buffer& image = input.image;
  const uint64_t pages = std::clamp<uint64_t>(image.size() / kPageBytes, 1, kPagesMax);
  const uint64_t tail =
      image.size() > pages * kPageBytes ? (image.size() - pages * kPageBytes) / kTailUnit : 0;
  Buffer bytes;
  append(&bytes, static_cast<uint8_t>(pages - 1));
  append(&bytes, static_cast<uint8_t>(std::min<uint64_t>(tail, UINT8_MAX)));
  append(&bytes, input.keep);
  append(&bytes, input.actions);
  const auto is_zero = [](std::byte byte) { return byte == std::byte{0}; };
  for (uint64_t begin = 0; begin < image.size();) {
    begin = std::find_if_not(image.begin() + begin, image.end(), is_zero) - image.begin();
    uint64_t end = begin, zeros = 0;
    for (uint64_t at = begin; at < image.size() && at - begin < kPartMax; ++at) {
      zeros = is_zero(image[at]) ? zeros + 1 : 0;
      if (zeros == 0) end = at + 1;
      if (zeros == kGapBytes) break;
    }
    if (end == begin) break;
    append(&bytes, static_cast<uint32_t>(begin));
    append(&bytes, static_cast<uint16_t>(end - begin));
    bytes.insert(bytes.end(), image.begin() + begin, image.begin() + end);
    begin = end;
  }
  return bytes;
}

void put_bytes(Buffer* image, uint64_t offset, Bytes bytes) {
  if (offset > image->size()) return;
  const uint64_t count = std::min<uint64_t>(bytes.size(), image->size() - offset);
  std::copy_n(bytes.begin(), count, image->begin() + offset);
}

Buffer empty_store(uint32_t slots, uint32_t pages) {
  Buffer image(pages * kPageBytes);
  put(&image, 0, encode_header(kStoreId, slots, 0x18ec09cce4c9c220));
  return image;
}

void plant(Buffer* image, const Planted& planted) {
  const uint64_t id = get<Header>(*image, 0).store_id;
  uint64_t chunks = 0;
  for (uint64_t bytes : planted.extents) chunks += (bytes + kChunkBytes - 1) / kChunkBytes;
  const uint64_t record_bytes = record_table_end(chunks) + planted.host_bytes;
  const Layout layout = Layout::of(planted.extents, round_up(record_bytes, kPageBytes));
  const Buffer blob(planted.blob_bytes, std::byte{'b'});
  const Buffer manifest = encode_manifest(id, layout, blob);
  put_bytes(image, planted.manifest_offset, manifest);
  for (size_t i = 0; i < planted.extents.size(); ++i) {
    const Buffer data(std::min<uint64_t>(planted.extents[i], image->size()),
                      static_cast<std::byte>(planted.version * 16 + i + 1));
    put_bytes(image, planted.record_offset + layout.extent_offsets[i], data);
  }
  const RecordHead head = {0, 0, id, planted.step, planted.host_bytes};
  put_bytes(image, planted.record_offset, RecordFront(chunks).seal(head));
  put_bytes(image, planted.record_offset + record_table_end(chunks),
            Buffer(planted.host_bytes, std::byte{'h'}));
  Slot slot = {};
  slot.store_id = id;
  slot.generation = planted.generation;
  slot.manifest_bytes = static_cast<uint32_t>(manifest.size());
  slot.version = planted.version;
  slot.step = planted.step;
  slot.manifest_offset = planted.manifest_offset;
  slot.record_offset = planted.record_offset;
  slot.record_bytes = static_cast<uint32_t>(record_bytes);
  put(image, slot_offset(planted.index), slot);
  repair_record(image, slot, kChunkSums);
  slot.manifest_crc = sum(*image, slot.manifest_offset, slot.manifest_bytes, 0);
  slot.record_crc = sum(*image, slot.record_offset, slot.record_bytes, 0);
  put(image, slot_offset(planted.index), encode_slot(slot));
}

void seal(Buffer* image, uint32_t repairs) {
  auto header = get<Header>(*image, 0);
  header.crc = crc32c(0, &header, offsetof(Header, crc));
  put(image, 0, header);
  for (uint32_t index = 0; index < slots_of(*image); ++index) {
    Slot slot = get<Slot>(*image, slot_offset(index));
    const Slot none = {};
    if (std::memcmp(&slot, &none, sizeof(slot)) == 0) continue;  // an empty one stays empty
    if (repairs & kIds) slot.store_id = header.store_id;
    if (slot.store_id != header.store_id) continue;  // something else may lie there
    repair_manifest(image, slot, repairs);
    repair_record(image, slot, repairs);
    slot.manifest_crc = sum(*image, slot.manifest_offset, slot.manifest_bytes, slot.manifest_crc);
    slot.record_crc = sum(*image, slot.record_offset, slot.record_bytes, slot.record_crc);
    put(image, slot_offset(index), encode_slot(slot));
  }
}

}  // namespace lightckpt::fuzz
