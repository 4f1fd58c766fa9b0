// CRC-32C (Castagnoli polynomial, RFC 3720): the checksum of everything lightckpt stores.
//
// Here are the sums that need no copy, and the table that every processor can use; kernels.h has
// the instructions, and the copies that sum as they go.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace lightckpt {

// Continues `crc` (0 to begin) over `bytes` bytes.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

// The same without special instructions: the reference that tests compare with.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes);

// Steps of that: the register (not inverted) after eight bytes, the first of them lowest, or one.
using CrcTables = std::array<std::array<uint32_t, 256>, 8>;
extern const CrcTables kCrcTables;

inline uint32_t crc32c_add_word(uint32_t crc, uint64_t word) {
  word ^= crc;
  crc = 0;
  for (size_t i = 0; i < 8; ++i) crc ^= kCrcTables[7 - i][word >> 8 * i & 0xff];
  return crc;
}

inline uint32_t crc32c_add_byte(uint32_t crc, uint8_t byte) {
  return (crc >> 8) ^ kCrcTables[0][(crc ^ byte) & 0xff];
}

}  // namespace lightckpt
