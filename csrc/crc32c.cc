// CRC-32C by table, eight bytes at a time. See crc32c.h.
#include "crc32c.h"

#include <cstring>

#include "kernels.h"

namespace lightckpt {
namespace {

constexpr uint32_t kReflectedPolynomial = 0x82f63b78;  // coefficients of low powers first

// Table t: what a byte adds to the register from t bytes before the last.
constexpr CrcTables make_tables() {
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

}  // namespace

constinit const CrcTables kCrcTables = make_tables();

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; bytes >= 8; p += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    crc = crc32c_add_word(crc, word);
  }
  for (; bytes > 0; ++p, --bytes) crc = crc32c_add_byte(crc, *p);
  return ~crc;
}

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
  return kernels().sum(nullptr, static_cast<const std::byte*>(data), bytes, crc);
}

}  // namespace lightckpt
