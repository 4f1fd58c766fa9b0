// The bytes on the media; docs/FORMAT.md is the same in prose, with a worked example.
//
//   header (4 KiB) | slot pages (4 KiB each, one slot per page) | manifests and areas, anywhere
//
//   manifest := ManifestHead, u64 bytes per extent, blob
//   area     := record (its capacity is in the manifest head), extents each at the next 256 B
//   record   := RecordHead, u32 CRC-32C per chunk of each extent, padding to 64 B, host state
//
// All integers little-endian, all references offsets from the start of the media. Everything that
// is stored is read through a check here: of its checksum first, then of every length in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "media.h"
#include "status.h"

namespace lightckpt {

inline constexpr uint32_t kFormat = 1;
inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kChunkBytes = 1 << 20;  // the unit of work and of checksums
inline constexpr uint64_t kExtentAlign = 256;     // Optane writes in units of 256 bytes
inline constexpr uint32_t kSlotsMin = 4, kSlotsMax = 64;
inline constexpr uint32_t kExtentsMax = 1u << 28;
// No slot has version 0: it names the attempt in flight. The last numbers are given to no other.
inline constexpr uint64_t kVersionMax = UINT64_MAX;
inline constexpr uint32_t kGenerationMax = UINT32_MAX;
// More than a record's checksums can cover, and so few that no sum of extents overflows.
inline constexpr uint64_t kExtentBytesMax = uint64_t{1} << 48;

struct Header {
  char magic[8];
  uint32_t format;
  uint32_t slot_count;
  uint64_t store_id;
  uint64_t chunk_bytes;
  uint64_t created_unix_ns;
  uint64_t shutdowns;  // the media's unsafe ones when the store was made, plus one; 0: not known
  uint64_t zero;
  uint32_t catalog;  // CatalogKind: where the slots are
  uint32_t crc;
};

struct Slot {
  uint64_t store_id;
  uint32_t generation;
  uint32_t manifest_bytes;
  uint64_t version;
  uint64_t step;
  uint64_t manifest_offset;
  uint64_t record_offset;
  uint32_t record_bytes;
  uint32_t record_crc;
  uint32_t manifest_crc;
  uint32_t crc;
};

struct ManifestHead {
  uint32_t magic;
  uint32_t extent_count;
  uint64_t store_id;
  uint64_t record_capacity;
  uint64_t area_bytes;
  uint64_t blob_bytes;
};

struct RecordHead {
  uint32_t magic;
  uint32_t chunk_count;
  uint64_t store_id;
  uint64_t step;
  uint64_t host_bytes;
};

static_assert(sizeof(Header) == 64 && offsetof(Header, crc) == 60);
static_assert(sizeof(Slot) == 64 && offsetof(Slot, crc) == 60, "one cache line, crc at its end");
static_assert(sizeof(ManifestHead) == 40 && sizeof(RecordHead) == 32);

constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

constexpr uint64_t slot_offset(uint32_t slot) { return kPageBytes * (1 + uint64_t{slot}); }
constexpr uint64_t heap_offset(uint32_t slot_count) { return slot_offset(slot_count); }

// Areas of at least a huge page start on one.
constexpr uint64_t area_align(uint64_t area_bytes) {
  return area_bytes >= 2ull << 20 ? 2ull << 20 : kPageBytes;
}

// Where everything of a manifest lies within its area. Pure arithmetic on the extents' sizes.
struct Layout {
  std::vector<uint64_t> extent_bytes;
  std::vector<uint64_t> extent_offsets;  // from the area's start
  std::vector<uint64_t> first_chunks;    // index of each extent's first chunk
  uint64_t chunk_count = 0;
  uint64_t record_capacity = 0;
  uint64_t area_bytes = 0;

  static Layout of(std::vector<uint64_t> extent_bytes, uint64_t record_capacity);
};

constexpr uint64_t record_table_end(uint64_t chunk_count) {
  return round_up(sizeof(RecordHead) + chunk_count * sizeof(uint32_t), 64);
}

// A new store's header page, with `shutdowns` and `catalog` as in the header; `encode_slot` fills
// in the checksum of a slot's other fields.
Header encode_header(uint64_t store_id, uint32_t slot_count, uint64_t created_unix_ns,
                     uint64_t shutdowns = 0, uint32_t catalog = 0);
Slot encode_slot(Slot slot);
std::vector<std::byte> encode_manifest(uint64_t store_id, const Layout& layout, Bytes blob);

// A record up to where its host state begins: head, checksum table, padding. It is laid out at
// once; then checksums are filled in as chunks are written, and the head comes last.
class RecordFront {
 public:
  explicit RecordFront(uint64_t chunk_count = 0) { reset(chunk_count); }
  RecordFront(const std::vector<uint32_t>& table);  // NOLINT: a record whose chunks are known

  // All zero. Allocates only where it has never been so large.
  void reset(uint64_t chunk_count);
  uint64_t chunk_count() const { return chunk_count_; }
  uint32_t* table() { return reinterpret_cast<uint32_t*>(bytes_.data() + sizeof(RecordHead)); }
  // Fills in the head's other fields, and returns all of it.
  Bytes seal(RecordHead head);

 private:
  uint64_t chunk_count_ = 0;
  std::vector<std::byte> bytes_;
};

// Each checks before it trusts, and says in words what is wrong.
Status decode_header(const Media& media, Header* header);
bool is_slot(const Header& header, const Slot& slot);
// `manifest` is what the slot names; `blob` points into it.
Status decode_manifest(const Media& media, const Slot& slot, Bytes manifest, Layout* layout,
                       Bytes* blob);
// Whether the slot's area lies where it may: in the media, and not over header or slots.
Status check_area(const Media& media, const Header& header, const Slot& slot, const Layout& layout);
// What is wrong with a version, in a message that names it.
Status damaged(const Slot& slot, const std::string& what);
// `table` and `host` point into the media.
Status decode_record(const Media& media, const Slot& slot, const Layout& layout,
                     const uint32_t** table, Bytes* host);

}  // namespace lightckpt
