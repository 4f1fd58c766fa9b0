// The mutator: changes fields as what they are, so that what it makes is nearly a store.
//
// A fuzzer that flips bytes never gets past a checksum. So this one picks a field of the header, of
// a slot or of what the slot reaches, gives it a value that hurts, or one that stands elsewhere in
// the store, and then makes the checksums right.
#include <algorithm>

#include "image.h"

namespace lightckpt::fuzz {
namespace {

struct Field {
  uint64_t offset;
  size_t bytes;
};

#define FIELD(Type, name) {offsetof(Type, name), sizeof(Type::name)}

const std::vector<Field> kHeaderFields = {
    FIELD(Header, magic),     FIELD(Header, format),      FIELD(Header, slot_count),
    FIELD(Header, store_id),  FIELD(Header, chunk_bytes), FIELD(Header, created_unix_ns),
    FIELD(Header, shutdowns), FIELD(Header, catalog)};
const std::vector<Field> kSlotFields = {FIELD(Slot, store_id),       FIELD(Slot, generation),
                                        FIELD(Slot, manifest_bytes), FIELD(Slot, version),
                                        FIELD(Slot, step),           FIELD(Slot, manifest_offset),
                                        FIELD(Slot, record_offset),  FIELD(Slot, record_bytes),
                                        FIELD(Slot, record_crc),     FIELD(Slot, manifest_crc)};
const std::vector<Field> kManifestFields = {
    FIELD(ManifestHead, magic),      FIELD(ManifestHead, extent_count),
    FIELD(ManifestHead, store_id),   FIELD(ManifestHead, record_capacity),
    FIELD(ManifestHead, area_bytes), FIELD(ManifestHead, blob_bytes),
    {sizeof(ManifestHead), 8},       {sizeof(ManifestHead) + 8, 8},
    {sizeof(ManifestHead) + 16, 8}};
const std::vector<Field> kRecordFields = {
    FIELD(RecordHead, magic),   FIELD(RecordHead, chunk_count), FIELD(RecordHead, store_id),
    FIELD(RecordHead, step),    FIELD(RecordHead, host_bytes),  {sizeof(RecordHead), 4},
    {sizeof(RecordHead) + 4, 4}};

#undef FIELD

class Mutator {
 public:
  Mutator(Input* input, Random* random) : input_(*input), image_(input->image), random_(*random) {}

  void change_one() {
    switch (below(12)) {
      case 0:
        return change(0, kHeaderFields);
      case 1:
      case 2:
      case 3:
        return change(slot_offset(any_slot()), kSlotFields);
      case 4:
      case 5:
        return change(get<Slot>(image_, used_slot()).manifest_offset, kManifestFields);
      case 6:
        return change(get<Slot>(image_, used_slot()).record_offset, kRecordFields);
      case 7:
        return put(&image_, slot_offset(any_slot()), get<Slot>(image_, used_slot()));
      case 8:
        return plant_any();
      case 9:
        return resize();
      case 10:
        return change_plan();
      default:
        return put(&image_, below(image_.size()), static_cast<uint8_t>(random_()));
    }
  }

 private:
  uint64_t below(uint64_t bound) { return bound == 0 ? 0 : random_() % bound; }

  uint32_t slot_count() {
    const auto said = get<Header>(image_, 0).slot_count;
    return std::clamp(said, kSlotsMin, kSlotsMax);
  }
  uint32_t any_slot() { return static_cast<uint32_t>(below(slot_count())); }

  // The offset of a slot that names something; of any slot where none does.
  uint64_t used_slot() {
    const uint32_t first = any_slot();
    for (uint32_t i = 0; i < slot_count(); ++i) {
      const uint64_t offset = slot_offset((first + i) % slot_count());
      if (get<Slot>(image_, offset).store_id != 0) return offset;
    }
    return slot_offset(first);
  }

  uint64_t any_value(uint64_t now) {
    const uint64_t pages = image_.size() / kPageBytes;
    switch (below(14)) {
      case 0:
        return 0;
      case 1:
        return below(4);
      case 2:
        return now + 1;
      case 3:
        return now - 1;
      case 4:
        return now ^ uint64_t{1} << below(64);
      case 5:
        return below(pages + 2) * kPageBytes;
      case 6:
        return image_.size() - below(3);
      case 7:
        return UINT64_MAX - below(3);
      case 8:
        return UINT32_MAX - below(3);
      case 9:
        return uint64_t{1} << below(64);
      case 10:
        return now + kPageBytes;
      case 11:
        return now - kPageBytes;
      case 12:
        return get<uint64_t>(image_, used_slot() + below(8) * 8);
      default:
        return below(image_.size());
    }
  }

  void change(uint64_t base, const std::vector<Field>& fields) {
    const Field& field = fields[below(fields.size())];
    const uint64_t offset = base + field.offset;
    if (offset > image_.size()) return;
    const uint64_t value = any_value(get<uint64_t>(image_, offset));
    put_bytes(&image_, offset, std::as_bytes(std::span(&value, 1)).first(field.bytes));
  }

  void plant_any() {
    Planted planted;
    planted.index = any_slot();
    planted.generation = below(4) == 0 ? static_cast<uint32_t>(any_value(0)) : below(3);
    planted.version = below(4) == 0 ? any_value(5) : 1 + below(9);
    planted.step = below(100);
    const uint64_t pages = image_.size() / kPageBytes;
    planted.manifest_offset = below(pages) * kPageBytes + (below(4) == 0 ? below(kPageBytes) : 0);
    planted.record_offset = below(pages) * kPageBytes;
    planted.extents.resize(below(4));
    for (uint64_t& bytes : planted.extents) {
      bytes = below(3) == 0 ? 0 : below(below(4) == 0 ? 3 * kPageBytes : 64);
    }
    planted.blob_bytes = below(20);
    planted.host_bytes = below(20);
    plant(&image_, planted);
  }

  void resize() {
    const uint64_t pages = below(4) == 0 ? below(kPagesMax) : image_.size() / kPageBytes + below(5);
    image_.resize(std::clamp<uint64_t>(pages, 3, kPagesMax + 2) * kPageBytes - 2 * kPageBytes +
                  (below(4) == 0 ? below(256) * 16 : 0));
  }

  void change_plan() {
    if (below(3) == 0) input_.keep = static_cast<uint8_t>(random_());
    input_.actions[below(kActions)] = static_cast<uint8_t>(random_());
  }

  Input& input_;
  Buffer& image_;
  Random& random_;
};

}  // namespace

void mutate(Input* input, Random* random) {
  Mutator mutator(input, random);
  for (uint64_t turn = 1 + (*random)() % 4; turn > 0; --turn) mutator.change_one();
  // Some keep what is wrong; the rest differ in how much is made right.
  if ((*random)() % 8 != 0) seal(&input->image, static_cast<uint32_t>((*random)() % 16));
}

}  // namespace lightckpt::fuzz
