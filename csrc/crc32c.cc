// See crc32c.h.
#include "crc32c.h"

#include <cstring>

#include "crc32c_table.h"
#include "instruction_set.h"

namespace lightckpt {

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
