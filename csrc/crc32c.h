// CRC-32C (Castagnoli polynomial, RFC 3720): the checksum of everything lightckpt stores.
//
// Hardware instructions where the processor has them, in four chains per 4 KiB: one chain waits
// three cycles for each eight bytes, four chains keep the unit busy. A table otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lightckpt {

// Continues `crc` (0 to begin) over `bytes` bytes.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

// A copy that sums as it goes runs four chains by itself, over consecutive lanes of this size; this
// joins their registers (not inverted: the first chain starts from ~crc, the others from 0).
inline constexpr size_t kCrcLaneBytes = 1024;
uint32_t crc32c_join_lanes(uint32_t first, uint32_t second, uint32_t third, uint32_t fourth);

// The same without special instructions: the reference that tests compare with.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes);

}  // namespace lightckpt
