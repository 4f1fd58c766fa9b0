// Encoding and checked decoding of what is stored. See format.h.
#include "format.h"

#include <algorithm>

#include "crc32c.h"

namespace lightckpt {
namespace {

constexpr char kMagic[9] = "LIGHTCKP";
constexpr uint32_t kManifestMagic = 0x494e414d;  // "MANI"
constexpr uint32_t kRecordMagic = 0x4f434552;    // "RECO"

template <typename Line>
uint32_t crc_of_line(const Line& line) {
  return crc32c(0, &line, offsetof(Line, crc));
}

// True if [offset, offset + bytes) lies in the media, without overflow.
bool within(const Media& media, uint64_t offset, uint64_t bytes) {
  return offset <= media.size() && bytes <= media.size() - offset;
}

}  // namespace

Status damaged(const Slot& slot, const std::string& what) {
  return {Code::kFormat, "version " + std::to_string(slot.version) + " (step " +
                             std::to_string(slot.step) + "): " + what};
}

Layout Layout::of(std::vector<uint64_t> extent_bytes, uint64_t record_capacity) {
  Layout layout;
  layout.extent_bytes = std::move(extent_bytes);
  layout.extent_offsets.reserve(layout.extent_bytes.size());
  layout.first_chunks.reserve(layout.extent_bytes.size());
  layout.record_capacity = record_capacity;
  uint64_t end = round_up(record_capacity, kPageBytes);
  for (uint64_t bytes : layout.extent_bytes) {
    layout.extent_offsets.push_back(end);
    layout.first_chunks.push_back(layout.chunk_count);
    layout.chunk_count += (bytes + kChunkBytes - 1) / kChunkBytes;
    end = round_up(end + bytes, kExtentAlign);
  }
  layout.area_bytes = round_up(end, kPageBytes);
  return layout;
}

Header encode_header(uint64_t store_id, uint32_t slot_count, uint64_t created_unix_ns,
                     uint64_t shutdowns, uint32_t catalog) {
  Header header = {};
  std::memcpy(header.magic, kMagic, sizeof(header.magic));
  header.format = kFormat;
  header.slot_count = slot_count;
  header.store_id = store_id;
  header.chunk_bytes = kChunkBytes;
  header.created_unix_ns = created_unix_ns;
  header.shutdowns = shutdowns;
  header.catalog = catalog;
  header.crc = crc_of_line(header);
  return header;
}

Slot encode_slot(Slot slot) {
  slot.crc = crc_of_line(slot);
  return slot;
}

std::vector<std::byte> encode_manifest(uint64_t store_id, const Layout& layout, Bytes blob) {
  const ManifestHead head = {kManifestMagic,    static_cast<uint32_t>(layout.extent_bytes.size()),
                             store_id,          layout.record_capacity,
                             layout.area_bytes, blob.size()};
  const uint64_t table_bytes = layout.extent_bytes.size() * sizeof(uint64_t);
  std::vector<std::byte> bytes(sizeof(head) + table_bytes + blob.size());
  std::byte* const table = bytes.data() + sizeof(head);
  std::memcpy(bytes.data(), &head, sizeof(head));
  if (table_bytes > 0) std::memcpy(table, layout.extent_bytes.data(), table_bytes);
  std::ranges::copy(blob, table + table_bytes);
  return bytes;
}

RecordFront::RecordFront(const std::vector<uint32_t>& table) : RecordFront(table.size()) {
  std::ranges::copy(table, this->table());
}

void RecordFront::reset(uint64_t chunk_count) {
  bytes_.assign(record_table_end(chunk_count), std::byte{0});
  chunk_count_ = chunk_count;
}

Bytes RecordFront::seal(RecordHead head) {
  head.magic = kRecordMagic;
  head.chunk_count = static_cast<uint32_t>(chunk_count_);
  std::memcpy(bytes_.data(), &head, sizeof(head));
  return bytes_;
}

Status decode_header(const Media& media, Header* header) {
  if (media.size() < heap_offset(kSlotsMin)) {
    return {Code::kFormat, "not a lightckpt store: " + std::to_string(media.size()) +
                               " bytes are too few for a header and slots"};
  }
  std::memcpy(header, media.view(), sizeof(*header));
  if (std::memcmp(header->magic, kMagic, sizeof(header->magic)) != 0) {
    return {Code::kFormat, "not a lightckpt store: the first bytes are not LIGHTCKP"};
  }
  if (header->crc != crc_of_line(*header)) {
    return {Code::kFormat, "the store's header is damaged: its checksum is wrong"};
  }
  if (header->format != kFormat) {
    return {Code::kFormat, "the store has format " + std::to_string(header->format) +
                               "; this lightckpt reads format " + std::to_string(kFormat)};
  }
  if (header->catalog > 1) {
    return {Code::kFormat, "the store's header names catalog " + std::to_string(header->catalog) +
                               ", which this lightckpt does not know"};
  }
  if (header->slot_count < kSlotsMin || header->slot_count > kSlotsMax ||
      header->chunk_bytes != kChunkBytes || heap_offset(header->slot_count) > media.size()) {
    return {Code::kFormat, "the store's header asks for " + std::to_string(header->slot_count) +
                               " slots and chunks of " + std::to_string(header->chunk_bytes) +
                               " bytes in " + std::to_string(media.size()) + " bytes"};
  }
  return {};
}

bool is_slot(const Header& header, const Slot& slot) {
  return slot.crc == crc_of_line(slot) && slot.store_id == header.store_id && slot.version != 0;
}

Status decode_manifest(const Media& media, const Slot& slot, Bytes manifest, Layout* layout,
                       Bytes* blob) {
  const uint64_t bytes = manifest.size();
  if (bytes < sizeof(ManifestHead)) return damaged(slot, "its manifest is too short");
  if (crc32c(0, manifest.data(), bytes) != slot.manifest_crc) {
    return damaged(slot, "the checksum of its manifest is wrong");
  }
  ManifestHead head;
  std::memcpy(&head, manifest.data(), sizeof(head));
  const uint64_t table_bytes = uint64_t{head.extent_count} * sizeof(uint64_t);
  if (head.magic != kManifestMagic || head.store_id != slot.store_id ||
      head.extent_count > kExtentsMax || table_bytes > bytes - sizeof(head) ||
      head.blob_bytes != bytes - sizeof(head) - table_bytes) {
    return damaged(slot, "its manifest contradicts itself");
  }
  std::vector<uint64_t> extents(head.extent_count);
  if (table_bytes > 0) std::memcpy(extents.data(), manifest.data() + sizeof(head), table_bytes);
  // What is left of the media, so that no sum can overflow.
  uint64_t left = media.size();
  const auto fits = [&](uint64_t part) { return part <= left && (left -= part, true); };
  if (!fits(head.record_capacity) || !std::ranges::all_of(extents, fits)) {
    return damaged(slot, "its area is larger than the store");
  }
  *layout = Layout::of(std::move(extents), head.record_capacity);
  if (layout->area_bytes != head.area_bytes) {
    return damaged(slot, "its area has another size than its extents");
  }
  *blob = manifest.subspan(sizeof(head) + table_bytes, head.blob_bytes);
  return {};
}

// What lies over a slot would be changed by the commit that takes it.
Status check_area(const Media& media, const Header& header, const Slot& slot,
                  const Layout& layout) {
  if (slot.record_offset < heap_offset(header.slot_count)) {
    return damaged(slot, "its area lies over the store's slots");
  }
  if (slot.record_offset % kPageBytes != 0 ||
      !within(media, slot.record_offset, layout.area_bytes)) {
    return damaged(slot, "its area lies outside the store");
  }
  return {};
}

Status decode_record(const Media& media, const Slot& slot, const Layout& layout,
                     const uint32_t** table, Bytes* host) {
  const uint64_t table_end = record_table_end(layout.chunk_count);
  if (slot.record_bytes > layout.record_capacity || slot.record_bytes < table_end) {
    return damaged(slot, "its record has " + std::to_string(slot.record_bytes) +
                             " bytes; the area holds " + std::to_string(layout.record_capacity));
  }
  const std::byte* record = media.view() + slot.record_offset;
  if (crc32c(0, record, slot.record_bytes) != slot.record_crc) {
    return damaged(slot, "the checksum of its record is wrong");
  }
  RecordHead head;
  std::memcpy(&head, record, sizeof(head));
  if (head.magic != kRecordMagic || head.store_id != slot.store_id || head.step != slot.step ||
      head.chunk_count != layout.chunk_count || head.host_bytes != slot.record_bytes - table_end) {
    return damaged(slot, "its record contradicts its slot");
  }
  *table = reinterpret_cast<const uint32_t*>(record + sizeof(head));
  *host = Bytes(record + table_end, head.host_bytes);
  return {};
}

}  // namespace lightckpt
