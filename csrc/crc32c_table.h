// CRC-32C by table, eight bytes at a time: what every processor can do.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace lightckpt {

inline constexpr uint32_t kReflectedPolynomial = 0x82f63b78;  // coefficients of low powers first

using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

// Table t: what a byte adds to the register from t bytes before the last.
constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (kReflectedPolynomial & (0u - (crc & 1u)));
    tables[0][byte] = crc;
  }
  for (size_t t = 1; t < tables.size(); ++t) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t previous = tables[t - 1][byte];
      tables[t][byte] = (previous >> 8) ^ tables[0][previous & 0xff];
    }
  }
  return tables;
}

inline constexpr CrcTables kCrcTables = make_crc_tables();

// The register (not inverted) after eight bytes, the first of them lowest, or after one.
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
