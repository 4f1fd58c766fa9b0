// The bytes on the media. Goal: what is stored is what docs/FORMAT.md says, and whatever else is
// found there is refused in words: no byte of it can make a reader crash or look outside the store.
// Method: one small store with a known id, written by the real code, is compared with a dump; then
// each bit is flipped, each field gets values that hurt with every checksum made right again, and
// the store is cut at many lengths. Memory ends where the store ends, so the address sanitizer sees
// a look beyond.
#include "format.h"

#include <gtest/gtest.h>

#include <fstream>
#include <regex>

#include "store_helpers.h"
#include "test_media.h"

namespace lightckpt {
namespace {

constexpr uint64_t kStoreId = 0x1122334455667788;
constexpr uint64_t kCreated = 1'700'000'000'000'000'000;
constexpr uint32_t kSlots = 4;
constexpr uint64_t kManifest = 0x5000, kRecord = 0x6000;

Buffer bytes_of_text(const std::string& text) {
  Buffer bytes;
  for (char letter : text) bytes.push_back(static_cast<std::byte>(letter));
  return bytes;
}

// The worked example: one version of step 7, with three extents of 5, 0 and 300 bytes.
State example_state() {
  State state;
  state.step = 7;
  state.extents = {bytes_of_text("hello"), {}, Buffer(300, std::byte{0x2a})};
  state.blob = bytes_of_text("manifest");
  state.host = bytes_of_text("host state");
  return state;
}

Buffer example() {
  auto media = std::make_unique<HeapMedia>(14 * kPageBytes);
  const Header header = encode_header(kStoreId, kSlots, kCreated);
  media->store(0, std::as_bytes(std::span(&header, 1)));
  std::unique_ptr<Store> store;
  EXPECT_TRUE(is_ok(Store::open(std::move(media), {}, false, &store)));
  EXPECT_TRUE(is_ok(save(store.get(), example_state(), 1)));
  return Buffer(all_of(store.get()).begin(), all_of(store.get()).end());
}

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

// offset: bytes, as `hexdump -C` has them, without the text beside.
constexpr const char* kDump = R"(
0000  4c 49 47 48 54 43 4b 50  01 00 00 00 04 00 00 00
)";

// Offset and bytes of each line that looks like a dump's.
std::vector<std::pair<uint64_t, Buffer>> dump_lines(const std::string& text) {
  static const std::regex kLine(
      R"(^\s*([0-9a-f]{4,8}):?\s+((?:[0-9a-f]{2}\s+){0,15}[0-9a-f]{2})\b)");
  std::vector<std::pair<uint64_t, Buffer>> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    std::smatch match;
    if (!std::regex_search(line, match, kLine)) continue;
    Buffer bytes;
    std::istringstream digits(match[2]);
    for (std::string byte; digits >> byte;) {
      bytes.push_back(static_cast<std::byte>(std::stoul(byte, nullptr, 16)));
    }
    lines.emplace_back(std::stoull(match[1], nullptr, 16), std::move(bytes));
  }
  return lines;
}

// What the example consists of besides zeros and the extents' bytes.
const std::vector<std::pair<uint64_t, uint64_t>> kParts = {
    {0, 64}, {kPageBytes, 64}, {kManifest, 40 + 3 * 8 + 8}, {kRecord, 64 + 10}};

std::string dump_of(const Buffer& image) {
  std::string text;
  char word[16];
  for (const auto& [offset, bytes] : kParts) {
    for (uint64_t at = offset; at < offset + bytes; ++at) {
      if ((at - offset) % 16 == 0) {
        std::snprintf(word, sizeof(word), "\n%04llx ", static_cast<unsigned long long>(at));
        text += word;
      }
      std::snprintf(word, sizeof(word), " %02x", std::to_integer<unsigned>(image[at]));
      text += word;
    }
  }
  return text;
}

void expect_dump_matches(const std::string& text) {
  const Buffer image = example();
  RangeSet seen;
  for (const auto& [offset, bytes] : dump_lines(text)) {
    ASSERT_LE(offset + bytes.size(), image.size());
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), image.begin() + offset))
        << "the line of offset " << offset << " differs; the example is" << dump_of(image);
    seen.add(offset, offset + bytes.size());
  }
  for (const auto& [offset, bytes] : kParts) {
    EXPECT_TRUE(seen.contains(offset, offset + bytes))
        << "no line shows all of " << offset << " to " << offset + bytes << "; the example is"
        << dump_of(image);
  }
}

TEST(Format, a_store_has_these_bytes) { expect_dump_matches(kDump); }

TEST(Format, the_worked_example_of_the_document_has_these_bytes) {
  const auto root = std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();
  std::ifstream document(root / "docs" / "FORMAT.md");
  if (!document) GTEST_SKIP() << "docs/FORMAT.md is not there";
  expect_dump_matches({std::istreambuf_iterator<char>(document), {}});
}

TEST(Format, the_example_can_be_read) {
  EXPECT_TRUE(is_ok(examine(example())));
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(open_bytes(example(), &store)));
  EXPECT_TRUE(holds(store.get(), store->versions().front(), example_state()));
}

TEST(Layout, extents_are_aligned_disjoint_and_inside_the_area) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<uint64_t> sizes(random() % 20);
    for (uint64_t& bytes : sizes) bytes = random() % (uint64_t{1} << random() % 24);
    const uint64_t capacity = random() % 20'000;
    const Layout layout = Layout::of(sizes, capacity);
    uint64_t end = capacity, chunks = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_GE(layout.extent_offsets[i], end) << "seed " << seed;
      EXPECT_EQ(layout.extent_offsets[i] % kExtentAlign, 0u) << "seed " << seed;
      EXPECT_EQ(layout.first_chunks[i], chunks) << "seed " << seed;
      end = layout.extent_offsets[i] + sizes[i];
      chunks += (sizes[i] + kChunkBytes - 1) / kChunkBytes;
    }
    EXPECT_EQ(layout.chunk_count, chunks) << "seed " << seed;
    EXPECT_GE(layout.area_bytes, end) << "seed " << seed;
    EXPECT_EQ(layout.area_bytes % kPageBytes, 0u) << "seed " << seed;
  }
}

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
  expect(kRecord + kPageBytes, 5, Code::kChanged, "a chunk");
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
                                     {"extent 2", kManifest + 56, 8},
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
                               round_up(value, kPageBytes) == kPageBytes && value >= 74;
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
  EXPECT_TRUE(fails(decode_manifest(media, slot, &decoded, &blob), Code::kFormat, "larger"));
}

TEST(Damage, a_store_cut_at_any_length_is_refused_or_its_version_is) {
  const Buffer whole = example();
  for (uint64_t bytes = 0; bytes < whole.size(); bytes += bytes < 128 ? 1 : 61) {
    const Status status = examine(Bytes(whole).first(bytes));
    const uint64_t area_end = kRecord + 2 * kPageBytes;
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
    EXPECT_TRUE(fails(examine(random_bytes(14 * kPageBytes, seed)), Code::kFormat, "not a light"))
        << "seed " << seed;
  }
}

}  // namespace
}  // namespace lightckpt
