// CRC-32C (Castagnoli polynomial, RFC 3720): the checksum of everything lightckpt stores.
//
// Here are the sums that need no copy; copy.h has the copies that sum as they go.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lightckpt {

// Continues `crc` (0 to begin) over `bytes` bytes.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

// The same without special instructions: the reference that tests compare with.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes);

}  // namespace lightckpt
