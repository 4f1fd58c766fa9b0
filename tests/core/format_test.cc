// The bytes on the media. Goal: what is stored is what docs/FORMAT.md says, byte by byte, and
// extents lie where they may. Method: the store of the document's worked example is made again by
// the real code and compared with the document's dump; layouts are drawn by seed. damage_test.cc
// has what is not as it says.
#include "format.h"

#include <gtest/gtest.h>

#include <cctype>
#include <fstream>
#include <sstream>

#include "format_example.h"

namespace lightckpt {
namespace {

struct DumpLine {
  uint64_t offset;
  Buffer bytes;
};

// Lines of an offset of eight digits, two spaces, and groups of digits; a comment stands after two
// spaces more.
std::vector<DumpLine> dump_lines(std::istream& text) {
  std::vector<DumpLine> lines;
  for (std::string line; std::getline(text, line);) {
    line.erase(0, line.find_first_not_of(' '));
    const auto is_digit = [](unsigned char letter) { return std::isxdigit(letter) != 0; };
    if (line.find("  ") != 8 || !std::all_of(line.begin(), line.begin() + 8, is_digit)) continue;
    DumpLine found = {std::stoull(line.substr(0, 8), nullptr, 16), {}};
    std::string digits = line.substr(10, line.find("  ", 10) - 10);
    std::erase(digits, ' ');
    for (size_t at = 0; at + 2 <= digits.size(); at += 2) {
      found.bytes.push_back(static_cast<std::byte>(std::stoul(digits.substr(at, 2), nullptr, 16)));
    }
    lines.push_back(std::move(found));
  }
  return lines;
}

std::string hex(Bytes bytes) {
  std::string text;
  for (std::byte byte : bytes) {
    for (int shift : {4, 0}) text += "0123456789abcdef"[std::to_integer<int>(byte) >> shift & 15];
  }
  return text;
}

TEST(Format, the_worked_example_of_the_document_is_what_the_store_writes) {
  const auto root = std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();
  std::ifstream document(root / "docs" / "FORMAT.md");
  ASSERT_TRUE(document) << "docs/FORMAT.md cannot be read";
  const Buffer image = example();
  RangeSet shown;
  for (const auto& [offset, bytes] : dump_lines(document)) {
    ASSERT_LE(offset + bytes.size(), image.size());
    EXPECT_EQ(hex(bytes), hex(Bytes(image).subspan(offset, bytes.size()))) << "at " << offset;
    shown.add(offset, offset + bytes.size());
  }
  for (uint64_t at = 0; at < image.size(); ++at) {
    EXPECT_TRUE(image[at] == std::byte{0} || shown.contains(at, at + 1)) << "not shown: " << at;
  }
}

TEST(Format, the_worked_example_can_be_read) {
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(open_bytes(example(), &store)));
  ASSERT_EQ(list_of(store->versions()), "1.0");
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

TEST(Layout, an_area_of_a_huge_page_or_more_starts_on_one) {
  constexpr uint64_t kHugePage = 2 << 20;
  EXPECT_EQ(area_align(kHugePage - kPageBytes), kPageBytes);
  EXPECT_EQ(area_align(kHugePage), kHugePage);
  EXPECT_EQ(area_align(5 * kHugePage), kHugePage);
}

}  // namespace
}  // namespace lightckpt
