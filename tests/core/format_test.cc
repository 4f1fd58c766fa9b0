// The bytes on the media. Goal: what is stored is what docs/FORMAT.md says, bit by bit, and extents
// lie where they may. Method: one small store with a known id, written by the real code, is
// compared with a dump, here and in the document; layouts are drawn by seed. damage_test.cc has the
// rest.
#include "format.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "format_example.h"

namespace lightckpt {
namespace {

// offset: bytes, as `hexdump -C` has them, without the text beside.
constexpr const char* kDump = R"(
0000  4c 49 47 48 54 43 4b 50  01 00 00 00 04 00 00 00
)";

// Offset and bytes of each line that looks like a dump's.
std::vector<std::pair<uint64_t, Buffer>> dump_lines(const std::string& text) {
  const auto is_hex = [](const std::string& word, size_t least, size_t most) {
    return word.size() >= least && word.size() <= most &&
           word.find_first_not_of("0123456789abcdef") == std::string::npos;
  };
  std::vector<std::pair<uint64_t, Buffer>> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    std::istringstream words(line);
    std::string word;
    if (!(words >> word) || !is_hex(word, 4, 8)) continue;
    const uint64_t offset = std::stoull(word, nullptr, 16);
    Buffer bytes;
    while (bytes.size() < 16 && words >> word && is_hex(word, 2, 2)) {
      bytes.push_back(static_cast<std::byte>(std::stoul(word, nullptr, 16)));
    }
    if (!bytes.empty()) lines.emplace_back(offset, std::move(bytes));
  }
  return lines;
}

std::string dump_of(const Buffer& image) {
  std::string text;
  char word[24];
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

}  // namespace
}  // namespace lightckpt
