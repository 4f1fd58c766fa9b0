// CRC-32C by table and by instruction. Joining chains needs "append n zero bytes" as an operator on
// a checksum; it is linear over GF(2), so for a fixed n it is four tables of 256 entries, built
// once by squaring the operator for one bit.
#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace lightckpt {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // reflected
constexpr size_t kLaneBytes = kCrcLaneBytes;
constexpr size_t kLanes = 4;

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_byte_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (kPolynomial & (0u - (crc & 1u)));
    tables[0][byte] = crc;
  }
  for (size_t t = 1; t < 8; ++t) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[t - 1][byte];
      tables[t][byte] = (previous >> 8) ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}

constexpr Tables kByteTables = make_byte_tables();

using Matrix = std::array<uint32_t, 32>;  // column i: the image of bit i

uint32_t apply(const Matrix& matrix, uint32_t vector) {
  uint32_t sum = 0;
  for (size_t i = 0; vector != 0; ++i, vector >>= 1) {
    if (vector & 1u) sum ^= matrix[i];
  }
  return sum;
}

struct ShiftTable {
  std::array<std::array<uint32_t, 256>, 4> bytes{};

  explicit ShiftTable(size_t zero_bytes) {
    Matrix power{};  // the operator for 2^k zero bits, from k = 0
    power[0] = kPolynomial;
    for (size_t i = 1; i < 32; ++i) power[i] = 1u << (i - 1);
    Matrix total{};
    for (size_t i = 0; i < 32; ++i) total[i] = 1u << i;
    for (size_t bits = zero_bytes * 8; bits != 0; bits >>= 1) {
      if (bits & 1u) {
        for (uint32_t& column : total) column = apply(power, column);
      }
      Matrix square{};
      for (size_t i = 0; i < 32; ++i) square[i] = apply(power, power[i]);
      power = square;
    }
    for (size_t b = 0; b < 4; ++b) {
      for (uint32_t value = 0; value < 256; ++value) bytes[b][value] = apply(total, value << 8 * b);
    }
  }

  uint32_t operator()(uint32_t crc) const {
    return bytes[0][crc & 0xff] ^ bytes[1][crc >> 8 & 0xff] ^ bytes[2][crc >> 16 & 0xff] ^
           bytes[3][crc >> 24];
  }
};

#if defined(__x86_64__)

__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(uint32_t crc, const void* data,
                                                        size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t c0 = ~crc;
  while (bytes >= kLanes * kLaneBytes) {
    uint64_t c1 = 0, c2 = 0, c3 = 0;
    for (size_t i = 0; i < kLaneBytes; i += 8) {
      uint64_t w0, w1, w2, w3;
      std::memcpy(&w0, p + i, 8);
      std::memcpy(&w1, p + i + kLaneBytes, 8);
      std::memcpy(&w2, p + i + 2 * kLaneBytes, 8);
      std::memcpy(&w3, p + i + 3 * kLaneBytes, 8);
      c0 = _mm_crc32_u64(c0, w0);
      c1 = _mm_crc32_u64(c1, w1);
      c2 = _mm_crc32_u64(c2, w2);
      c3 = _mm_crc32_u64(c3, w3);
    }
    c0 = crc32c_join_lanes(static_cast<uint32_t>(c0), static_cast<uint32_t>(c1),
                           static_cast<uint32_t>(c2), static_cast<uint32_t>(c3));
    p += kLanes * kLaneBytes;
    bytes -= kLanes * kLaneBytes;
  }
  for (; bytes >= 8; p += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    c0 = _mm_crc32_u64(c0, word);
  }
  auto c = static_cast<uint32_t>(c0);
  for (; bytes > 0; ++p, --bytes) c = _mm_crc32_u8(c, *p);
  return ~c;
}

#endif

}  // namespace

uint32_t crc32c_join_lanes(uint32_t first, uint32_t second, uint32_t third, uint32_t fourth) {
  static const ShiftTable shift_lane(kLaneBytes);
  return shift_lane(shift_lane(shift_lane(first) ^ second) ^ third) ^ fourth;
}

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; bytes >= 8; p += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) crc ^= kByteTables[7 - i][word >> 8 * i & 0xff];
  }
  for (; bytes > 0; ++p, --bytes) crc = (crc >> 8) ^ kByteTables[0][(crc ^ *p) & 0xff];
  return ~crc;
}

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return crc32c_sse42(crc, data, bytes);
#endif
  return crc32c_portable(crc, data, bytes);
}

}  // namespace lightckpt
