// Damaged stores. Goal: whatever is found where a store should be is refused in words: no byte of
// it can make a reader crash or look outside. Method: in the worked example each bit is flipped,
// each field gets values that hurt, with every checksum made right again, and the store is cut at
// many lengths. Memory ends where the store ends, so the address sanitizer sees a look beyond.
#include <gtest/gtest.h>

#include "format_example.h"
#include "test_media.h"

namespace lightckpt {
namespace {

template <typename Plain>
Plain get(const Buffer& image, uint64_t offset) {
  Plain value;
  std::memcpy(&value, image.data() + offset, sizeof(value));
  return value;
}

template <typename Plain>
void put(Buffer* image, uint64_t offset, const Plain& value) {
  std::memcpy(image->data() + offset, &value, sizeof(value));
}

// Makes every checksum right again, so that only what they guard is wrong.
void seal(Buffer* image) {
  Slot slot = get<Slot>(*image, slot_offset(0));
  const auto sum = [&](uint64_t offset, uint64_t bytes, uint32_t otherwise) {
    const bool inside = offset <= image->size() && bytes <= image->size() - offset;
    return inside ? crc32c(0, image->data() + offset, bytes) : otherwise;
  };
  slot.manifest_crc = sum(slot.manifest_offset, slot.manifest_bytes, slot.manifest_crc);
  slot.record_crc = sum(slot.record_offset, slot.record_bytes, slot.record_crc);
  put(image, slot_offset(0), encode_slot(slot));
  const auto header = get<Header>(*image, 0);
  put(image, offsetof(Header, crc), crc32c(0, &header, offsetof(Header, crc)));
}

// Opens a store on these bytes and looks at everything that a reader would. The first error, or
// kNotFound where no version is listed.
Status examine(Bytes image) {
  std::unique_ptr<Store> store;
  RETURN_IF_ERROR(open_bytes(image, &store));
  const std::vector<Version> versions = store->versions();
  if (versions.empty()) return {Code::kNotFound, "no version is listed"};
  const Version& version = versions.front();
  RETURN_IF_ERROR(version.damage);
  const uint32_t* table = nullptr;
  Bytes host;
  RETURN_IF_ERROR(decode_record(store->media(), version.slot, *version.layout, &table, &host));
  for (size_t i = 0; i < version.layout->extent_bytes.size(); ++i) {
    const std::byte* begin =
        store->media().view() + version.slot.record_offset + version.layout->extent_offsets[i];
    for (uint64_t at = 0; at < version.layout->extent_bytes[i]; at += kChunkBytes, ++table) {
      const uint64_t bytes = std::min(kChunkBytes, version.layout->extent_bytes[i] - at);
      if (crc32c(0, begin + at, bytes) != *table) return {Code::kChanged, "a chunk differs"};
    }
  }
  // So that no byte of host state or blob lies outside either.
  const uint32_t all =
      crc32c(crc32c(0, host.data(), host.size()), version.blob.data(), version.blob.size());
  return all == 0 ? Status(Code::kChanged, "cannot happen") : Status();
}

TEST(Damage, the_example_is_whole) { EXPECT_TRUE(is_ok(examine(example()))); }

TEST(Damage, each_flipped_bit_of_the_header_is_refused) {
  for (uint64_t bit = 0; bit < sizeof(Header) * 8; ++bit) {
    Buffer image = example();
    image[bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_TRUE(fails(examine(image), Code::kFormat, "header") ||
                fails(examine(image), Code::kFormat, "not a lightckpt store"))
        << "bit " << bit;
  }
}

TEST(Damage, each_flipped_bit_of_a_slot_unlists_its_version) {
  for (uint64_t bit = 0; bit < sizeof(Slot) * 8; ++bit) {
    Buffer image = example();
    image[slot_offset(0) + bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_TRUE(fails(examine(image), Code::kNotFound)) << "bit " << bit;
  }
}

TEST(Damage, each_flipped_bit_behind_a_slot_is_noticed) {
  const Buffer whole = example();
  const Slot slot = get<Slot>(whole, slot_offset(0));
  const auto expect = [&](uint64_t offset, uint64_t bytes, Code code, const std::string& what) {
    for (uint64_t bit = 0; bit < bytes * 8; ++bit) {
      Buffer image = whole;
      image[offset + bit / 8] ^= std::byte{1} << bit % 8;
      EXPECT_TRUE(fails(examine(image), code, what)) << "bit " << bit << " of " << offset;
    }
  };
  expect(kManifest, slot.manifest_bytes, Code::kFormat,
         "version 1 (step 7): the checksum of its m");
  expect(kRecord, slot.record_bytes, Code::kFormat, "version 1 (step 7): the checksum of its r");
  expect(kExtents, 24, Code::kChanged, "a chunk");
}

TEST(Damage, a_header_of_another_kind_is_refused_in_words) {
  const auto with = [](uint64_t offset, auto value) {
    Buffer image = example();
    put(&image, offset, value);
    seal(&image);
    return examine(image);
  };
  EXPECT_TRUE(fails(with(offsetof(Header, format), 2u), Code::kFormat, "has format 2"));
  for (uint32_t slots : {0u, 3u, 65u, UINT32_MAX}) {
    EXPECT_TRUE(fails(with(offsetof(Header, slot_count), slots), Code::kFormat,
                      std::to_string(slots) + " slots"));
  }
  EXPECT_TRUE(fails(with(offsetof(Header, slot_count), 64u), Code::kFormat, "64 slots"))
      << "more than there is room for";
  EXPECT_TRUE(fails(with(offsetof(Header, chunk_bytes), uint64_t{1} << 21), Code::kFormat,
                    "chunks of 2097152"));
  EXPECT_TRUE(fails(with(offsetof(Header, store_id), uint64_t{5}), Code::kNotFound))
      << "slots of another store";
  EXPECT_TRUE(is_ok(with(offsetof(Header, created_unix_ns), uint64_t{5})));
}

std::vector<uint64_t> values_that_hurt(uint64_t right, uint64_t size) {
  return {0,
          1,
          2,
          31,
          32,
          33,
          right - 1,
          right + 1,
          right - kPageBytes,
          right + kPageBytes,
          size - kPageBytes,
          size - 1,
          size,
          size + 1,
          1ull << 31,
          UINT32_MAX,
          1ull << 32,
          1ull << 62,
          1ull << 63,
          UINT64_MAX - kPageBytes + 1,
          UINT64_MAX};
}

struct Field {
  const char* name;
  uint64_t offset;
  size_t bytes;
};

#define FIELD(base, Type, name) {#Type "." #name, (base) + offsetof(Type, name), sizeof(Type::name)}

TEST(Damage, no_value_of_a_field_goes_unnoticed_although_checksums_are_right) {
  const std::vector<Field> fields = {FIELD(slot_offset(0), Slot, store_id),
                                     FIELD(slot_offset(0), Slot, manifest_bytes),
                                     FIELD(slot_offset(0), Slot, step),
                                     FIELD(slot_offset(0), Slot, manifest_offset),
                                     FIELD(slot_offset(0), Slot, record_offset),
                                     FIELD(slot_offset(0), Slot, record_bytes),
                                     FIELD(kManifest, ManifestHead, magic),
                                     FIELD(kManifest, ManifestHead, extent_count),
                                     FIELD(kManifest, ManifestHead, store_id),
                                     FIELD(kManifest, ManifestHead, record_capacity),
                                     FIELD(kManifest, ManifestHead, area_bytes),
                                     FIELD(kManifest, ManifestHead, blob_bytes),
                                     {"extent 0", kManifest + 40, 8},
                                     {"extent 1", kManifest + 48, 8},
                                     FIELD(kRecord, RecordHead, magic),
                                     FIELD(kRecord, RecordHead, chunk_count),
                                     FIELD(kRecord, RecordHead, store_id),
                                     FIELD(kRecord, RecordHead, step),
                                     FIELD(kRecord, RecordHead, host_bytes),
                                     {"checksum 0", kRecord + 32, 4},
                                     {"checksum 1", kRecord + 36, 4}};
  const Buffer whole = example();
  for (const Field& field : fields) {
    uint64_t right = 0;
    std::memcpy(&right, whole.data() + field.offset, field.bytes);
    for (uint64_t value : values_that_hurt(right, whole.size())) {
      if (field.bytes == 4) value &= UINT32_MAX;
      // These sizes lead to the same layout, so they are not wrong but other, valid contents.
      const bool same_layout = std::string(field.name) == "ManifestHead.record_capacity" &&
                               round_up(value, kPageBytes) == kPageBytes && value >= 69;
      if (value == right || same_layout) continue;
      Buffer image = whole;
      std::memcpy(image.data() + field.offset, &value, field.bytes);
      seal(&image);
      const Status status = examine(image);
      EXPECT_FALSE(status.ok()) << field.name << " = " << value;
      EXPECT_FALSE(status.message().empty());
    }
  }
}

// All of it is right but for where it lies: its checksums would be read as misaligned integers.
TEST(Damage, an_area_that_starts_in_a_page_is_refused) {
  for (uint64_t shift : {1, 2, 64}) {
    Buffer image = example();
    const Buffer area(image.begin() + kRecord, image.begin() + kExtents + kPageBytes);
    std::ranges::copy(area, image.begin() + kRecord + shift);
    put(&image, slot_offset(0) + offsetof(Slot, record_offset), kRecord + shift);
    seal(&image);
    EXPECT_TRUE(fails(examine(image), Code::kFormat, "its area")) << shift;
  }
}

// Sixteen thousand extents, each no larger than the media, that add up to nothing in 64 bits.
TEST(Damage, extents_that_overflow_in_sum_are_refused) {
  constexpr uint64_t kPretended = uint64_t{1} << 50;
  constexpr uint64_t kCount = 1 << 14;
  TestMedia media(1 << 20);
  media.pretend_size(kPretended);
  const Layout layout = Layout::of(std::vector<uint64_t>(kCount, kPretended), kPageBytes);
  const std::vector<std::byte> manifest = encode_manifest(kStoreId, layout, {});
  media.store(kManifest, manifest);
  Slot slot = {};
  slot.store_id = kStoreId;
  slot.manifest_offset = kManifest;
  slot.manifest_bytes = static_cast<uint32_t>(manifest.size());
  slot.manifest_crc = crc32c(0, manifest.data(), manifest.size());
  slot.record_offset = kPageBytes;
  Layout decoded;
  Bytes blob;
  EXPECT_TRUE(
      fails(decode_manifest(media, slot, manifest, &decoded, &blob), Code::kFormat, "larger"));
}

// Stores whose numbers are right and at an edge: each once led to a lost version.

// The example with room, and with more slots: each a copy of its own with another number.
Buffer example_with(const std::vector<Slot>& changes) {
  Buffer image = example();
  image.resize(2 * image.size());
  for (uint32_t index = 0; index < changes.size(); ++index) {
    Slot slot = get<Slot>(image, slot_offset(0));
    slot.version = changes[index].version;
    slot.generation = changes[index].generation;
    if (changes[index].record_offset != 0) slot.record_offset = changes[index].record_offset;
    put(&image, slot_offset(index + 1), encode_slot(slot));
  }
  return image;
}

Slot numbered(uint64_t version, uint32_t generation = 0) {
  Slot slot = {};
  slot.version = version;
  slot.generation = generation;
  return slot;
}

TEST(Damage, behind_the_last_version_none_is_begun) {
  const Buffer image = example_with({numbered(UINT64_MAX - 1)});
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(open_bytes(image, &store)));
  const State state = State::of(8, {100});
  ASSERT_TRUE(is_ok(save(store.get(), state, 1)));
  EXPECT_TRUE(fails(save(store.get(), State::of(9, {100}), 1), Code::kFormat, "no number"));
  const auto again = reopened(store.get());
  EXPECT_EQ(again->versions().front().slot.version, UINT64_MAX);
  EXPECT_TRUE(holds(again.get(), again->versions().front(), state));
}

TEST(Damage, behind_the_last_generation_no_version_is_made_the_latest_again) {
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(open_bytes(example_with({numbered(2, UINT32_MAX)}), &store)));
  EXPECT_TRUE(fails(store->rebase(1), Code::kFormat, "no number"));
  EXPECT_EQ(list_of(store->versions()), "2.4294967295 1.0");
  EXPECT_EQ(list_of(reopened(store.get())->versions()), "2.4294967295 1.0");
}

TEST(Damage, there_is_no_version_zero) {
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(open_bytes(example_with({numbered(0, 9)}), &store)));
  EXPECT_EQ(list_of(store->versions()), "1.0");
}

TEST(Damage, an_area_over_the_slots_is_refused) {
  for (uint64_t offset : {uint64_t{0}, slot_offset(3), slot_offset(14)}) {
    Buffer image = example();
    const Buffer area(image.begin() + kRecord, image.begin() + kExtents + kPageBytes);
    if (offset > 0) std::ranges::copy(area, image.begin() + offset);
    put(&image, slot_offset(0) + offsetof(Slot, record_offset), offset);
    seal(&image);
    EXPECT_TRUE(fails(examine(image), Code::kFormat, "over the store's slots")) << offset;
  }
}

TEST(Damage, a_manifest_over_the_slots_is_refused) {
  Buffer image = example();
  const Buffer manifest(image.begin() + kManifest, image.begin() + kManifest + 66);
  std::ranges::copy(manifest, image.begin() + slot_offset(9));
  put(&image, slot_offset(0) + offsetof(Slot, manifest_offset), slot_offset(9));
  seal(&image);
  EXPECT_TRUE(fails(examine(image), Code::kFormat, "over the store's slots"));
}

TEST(Damage, of_two_slots_of_one_version_the_one_that_can_be_loaded_counts) {
  Slot outside = numbered(1, 5);
  outside.record_offset = 2 * kExampleBytes;
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(open_bytes(example_with({outside}), &store)));
  EXPECT_EQ(list_of(store->versions()), "1.0");
  Version found;
  EXPECT_TRUE(is_ok(store->find(1, &found)));
}

// Or a store of one large manifest would take many times its size in memory.
TEST(Damage, versions_of_one_manifest_share_its_layout) {
  Slot outside = numbered(4);
  outside.record_offset = 2 * kExampleBytes;
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(open_bytes(example_with({numbered(2), numbered(3), outside}), &store)));
  const std::vector<Version> versions = store->versions();
  ASSERT_EQ(list_of(versions), "4.0! 3.0 2.0 1.0");
  EXPECT_EQ(versions[1].layout, versions[3].layout);
  EXPECT_EQ(versions[2].layout, versions[3].layout);
  EXPECT_EQ(versions[2].blob.data(), versions[3].blob.data());
  Buffer image = example_with({numbered(2)});
  image[kManifest] ^= std::byte{1};
  ASSERT_TRUE(is_ok(open_bytes(image, &store)));
  EXPECT_EQ(store->versions().front().damage.message(),
            "version 2 (step 7): it shares the manifest of version 1 (step 7): the checksum of its "
            "manifest is wrong");
}

TEST(Damage, a_store_cut_at_any_length_is_refused_or_its_version_is) {
  const Buffer whole = example();
  for (uint64_t bytes = 0; bytes < whole.size(); bytes += bytes < 128 ? 1 : 61) {
    const Status status = examine(Bytes(whole).first(bytes));
    const uint64_t area_end = kExtents + kPageBytes;
    EXPECT_EQ(status.ok(), bytes >= area_end) << bytes << " bytes: " << status.message();
  }
}

TEST(Damage, random_bytes_with_right_checksums_crash_nobody) {
  const Buffer whole = example();
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 random(seed);
    Buffer image = whole;
    for (uint64_t turn = random() % 6 + 1; turn > 0; --turn) {
      const auto& [offset, bytes] = kParts[random() % kParts.size()];
      const uint64_t at = offset + random() % bytes;
      image[at] = static_cast<std::byte>(random() % 4 == 0 ? 0xff : random());
    }
    seal(&image);
    (void)examine(image).ok();  // whatever it says: it says it
  }
}

TEST(Damage, random_memory_is_no_store) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    EXPECT_TRUE(fails(examine(random_bytes(kExampleBytes, seed)), Code::kFormat, "not a light"))
        << "seed " << seed;
  }
}

}  // namespace
}  // namespace lightckpt
