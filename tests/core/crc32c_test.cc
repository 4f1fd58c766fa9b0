// CRC-32C. Goal: one function, whatever the processor, the length and the alignment. Method: the
// published vectors pin the portable version; the one with instructions is compared with it for
// every length up to many blocks, at every alignment of a word. Each set of instructions has its
// own cases in kernels_test.cc.
#include "crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>

#include "helpers.h"

namespace lightckpt {
namespace {

constexpr size_t kBytesMax = 9000;

struct Vector {
  std::string name;
  Buffer data;
  uint32_t crc;
};

Buffer counted(int first, int step) {
  Buffer data;
  for (int i = 0; i < 32; ++i) data.push_back(static_cast<std::byte>(first + i * step));
  return data;
}

// RFC 3720, appendix B.4, and the check value that catalogues of CRCs give.
std::vector<Vector> published_vectors() {
  constexpr std::array<uint8_t, 48> kReadCommand = {
      0x01, 0xc0, 0, 0,    0, 0, 0, 0,    0,    0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 0x04, 0,
      0,    0,    0, 0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0,    0};
  Buffer command(kReadCommand.size());
  std::ranges::transform(kReadCommand, command.begin(), [](uint8_t b) { return std::byte{b}; });
  Buffer digits;
  for (char digit = '1'; digit <= '9'; ++digit) digits.push_back(static_cast<std::byte>(digit));
  return {{"zeros", Buffer(32), 0x8a9136aa},
          {"ones", Buffer(32, std::byte{0xff}), 0x62a8ab43},
          {"ascending", counted(0, 1), 0x46dd794e},
          {"descending", counted(31, -1), 0x113fdb5c},
          {"read command", command, 0xd9963a56},
          {"digits", digits, 0xe3069283},
          {"nothing", {}, 0}};
}

TEST(Crc32c, published_vectors_come_out) {
  for (const Vector& vector : published_vectors()) {
    EXPECT_EQ(crc32c(0, vector.data.data(), vector.data.size()), vector.crc) << vector.name;
    EXPECT_EQ(crc32c_portable(0, vector.data.data(), vector.data.size()), vector.crc)
        << vector.name;
  }
}

// A sum over n + 1 bytes is the sum over n continued by one, so one pass gives every reference.
TEST(Crc32c, instructions_and_table_agree_at_every_length_and_alignment) {
  for (size_t alignment = 0; alignment < 8; ++alignment) {
    const Buffer data = random_bytes(alignment + kBytesMax, alignment);
    const std::byte* begin = data.data() + alignment;
    uint32_t reference = 0;
    for (size_t bytes = 0; bytes <= kBytesMax; ++bytes) {
      ASSERT_EQ(crc32c(0, begin, bytes), reference) << bytes << " bytes, alignment " << alignment;
      if (bytes < kBytesMax) reference = crc32c_portable(reference, begin + bytes, 1);
    }
    EXPECT_EQ(crc32c_portable(0, begin, kBytesMax), reference) << "alignment " << alignment;
  }
}

TEST(Crc32c, a_sum_goes_on_where_another_ended) {
  const Buffer data = random_bytes(kBytesMax, 1);
  const uint32_t whole = crc32c(0, data.data(), data.size());
  for (size_t cut = 0; cut <= kBytesMax; cut += 13) {
    const uint32_t front = crc32c(0, data.data(), cut);
    EXPECT_EQ(crc32c(front, data.data() + cut, data.size() - cut), whole) << "cut at " << cut;
    EXPECT_EQ(crc32c_portable(front, data.data() + cut, data.size() - cut), whole)
        << "cut at " << cut;
  }
}

TEST(Crc32c, every_flipped_bit_changes_the_sum) {
  Buffer data = random_bytes(4096 + 64, 2);
  const uint32_t whole = crc32c(0, data.data(), data.size());
  for (size_t at = 0; at < data.size(); at += 7) {
    for (int bit = 0; bit < 8; ++bit) {
      data[at] ^= std::byte{1} << bit;
      EXPECT_NE(crc32c(0, data.data(), data.size()), whole) << "byte " << at << ", bit " << bit;
      data[at] ^= std::byte{1} << bit;
    }
  }
}

}  // namespace
}  // namespace lightckpt
