// Kernel: one pass over bytes that copies them, or sums them, or does both at once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lightckpt {

inline constexpr size_t kLineBytes = 64;

// Copies `bytes` bytes, or only looks at them (then `to` is not used), and returns the CRC-32C that
// continues `crc`, if it sums.
using Kernel = uint32_t (*)(std::byte* to, const std::byte* from, size_t bytes, uint32_t crc);

struct Kernels {
  Kernel copy;      // whole target lines by non-temporal stores where there are any; no sum
  Kernel copy_sum;  // the same, summed
  Kernel sum;       // nothing is stored
};

}  // namespace lightckpt
