// What kernel_loop.h needs of each instruction set: registers, and how to sum, load and store them.
// Included by instruction_set.cc, and by the test that puts a hook between loads.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "crc32c_table.h"
#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lightckpt::kernel_sets {

struct Nowhere {
  static constexpr bool kStores = false, kStreams = false, kCaches = false;
};
struct Cached {
  static constexpr bool kStores = true, kStreams = false, kCaches = true;
};
struct Streamed {
  static constexpr bool kStores = true, kStreams = true, kCaches = false;
};

struct NoHook {
  static void loaded(const std::byte*, size_t) {}
};

__attribute__((always_inline)) inline void keep_word(uint64_t* word) {
  asm volatile("" : "+r"(*word));
}

inline constexpr uint32_t kPolynomial = 0x1edc6f41;  // coefficients of high powers first

// x to the power `n` modulo the polynomial, coefficients of high powers first.
constexpr uint32_t power_of_x(uint64_t n) {
  uint32_t power = 1;
  for (uint64_t i = 0; i < n; ++i) power = (power << 1) ^ (power >> 31 != 0 ? kPolynomial : 0);
  return power;
}

// The same with coefficients of low powers first, as a factor of a carry-less product.
constexpr uint64_t factor(uint64_t n) {
  const uint32_t power = power_of_x(n);
  uint64_t reflected = 0;
  for (int i = 0; i < 32; ++i) reflected |= uint64_t{power >> i & 1} << (32 - i);
  return reflected;
}

// What moves 128 bits of the message `bytes` bytes down it: one factor for each half.
struct Fold {
  uint64_t low, high;
};
constexpr Fold fold_by(uint64_t bytes) { return {factor(8 * bytes + 32), factor(8 * bytes - 32)}; }

#define UNROLLED _Pragma("GCC unroll 16")

namespace portable {

#define KERNEL __attribute__((always_inline)) inline
#define ENTRY

using Vector = uint64_t;
inline constexpr size_t kVectors = 8, kBlockBytes = kVectors * sizeof(Vector);

KERNEL uint32_t sum_word(uint32_t crc, uint64_t word) { return crc32c_add_word(crc, word); }
KERNEL uint32_t sum_byte(uint32_t crc, uint8_t byte) { return crc32c_add_byte(crc, byte); }

struct Sum {
  uint32_t crc;
  KERNEL explicit Sum(uint32_t begin) : crc(begin) {}
  KERNEL void start(size_t, uint64_t word) { crc = sum_word(crc, word); }
  KERNEL void go_on(size_t, uint64_t word) { crc = sum_word(crc, word); }
  KERNEL uint32_t finish() const { return crc; }
};

KERNEL uint64_t load(const std::byte* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}
KERNEL void keep(uint64_t* word) { keep_word(word); }
KERNEL void store(std::byte* to, uint64_t word) { std::memcpy(to, &word, sizeof(word)); }
KERNEL void prefetch(const std::byte* from) { __builtin_prefetch(from + 4096); }
KERNEL void stream_word(std::byte* to, uint64_t word) {
#if defined(__x86_64__)
  _mm_stream_si64(reinterpret_cast<long long*>(to), static_cast<long long>(word));
#else
  std::memcpy(to, &word, sizeof(word));
#endif
}
KERNEL void stream(std::byte* to, uint64_t word) { stream_word(to, word); }

#include "kernel_loop.h"

#undef KERNEL
#undef ENTRY

}  // namespace portable

#if defined(__x86_64__)

namespace crc32 {

#define KERNEL __attribute__((target("sse4.2"), always_inline)) inline
#define ENTRY __attribute__((target("sse4.2")))

using portable::kBlockBytes;
using portable::kVectors;
using portable::Vector;

KERNEL uint32_t sum_word(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
KERNEL uint32_t sum_byte(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }

struct Sum {
  uint32_t crc;
  KERNEL explicit Sum(uint32_t begin) : crc(begin) {}
  KERNEL void start(size_t, uint64_t word) { crc = sum_word(crc, word); }
  KERNEL void go_on(size_t, uint64_t word) { crc = sum_word(crc, word); }
  KERNEL uint32_t finish() const { return crc; }
};

using portable::keep;
using portable::load;
using portable::prefetch;
using portable::store;
using portable::stream;
using portable::stream_word;

#include "kernel_loop.h"

#undef KERNEL
#undef ENTRY

}  // namespace crc32

// The wider ones fold (kernel_fold.h), and sum what is too little for that by the crc32
// instruction.

namespace pclmul {

#define KERNEL __attribute__((target("sse4.2,pclmul"), always_inline)) inline
#define ENTRY __attribute__((target("sse4.2,pclmul")))

using Vector = __m128i;
inline constexpr size_t kVectors = 8, kBlockBytes = kVectors * sizeof(Vector);

KERNEL Vector load(const std::byte* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
KERNEL void keep(Vector* vector) { asm volatile("" : "+x"(*vector)); }
KERNEL void store(std::byte* to, Vector vector) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), vector);
}
KERNEL void stream(std::byte* to, Vector vector) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), vector);
}
KERNEL void prefetch(const std::byte* from) {
  __builtin_prefetch(from + 4096);
  __builtin_prefetch(from + 4096 + kLineBytes);
}
KERNEL Vector of_crc(uint32_t crc) { return _mm_cvtsi32_si128(static_cast<int>(crc)); }
KERNEL Vector of_fold(Fold fold) {
  return _mm_set_epi64x(static_cast<int64_t>(fold.high), static_cast<int64_t>(fold.low));
}
KERNEL Vector add(Vector one, Vector other) { return _mm_xor_si128(one, other); }
KERNEL Vector fold(Vector sum, Vector factors, Vector next) {
  return add(next, add(_mm_clmulepi64_si128(sum, factors, 0x00),
                       _mm_clmulepi64_si128(sum, factors, 0x11)));
}

#include "kernel_fold.h"
#include "kernel_loop.h"

#undef KERNEL
#undef ENTRY

}  // namespace pclmul

namespace vpclmul256 {

#define KERNEL __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq"), always_inline)) inline
#define ENTRY __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))

using Vector = __m256i;
inline constexpr size_t kVectors = 8, kBlockBytes = kVectors * sizeof(Vector);

KERNEL Vector load(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
KERNEL void keep(Vector* vector) { asm volatile("" : "+x"(*vector)); }
KERNEL void store(std::byte* to, Vector vector) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), vector);
}
KERNEL void stream(std::byte* to, Vector vector) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), vector);
}
KERNEL void prefetch(const std::byte* from) {
  UNROLLED
  for (size_t line = 0; line < kBlockBytes; line += kLineBytes) {
    __builtin_prefetch(from + 4096 + line);
  }
}
KERNEL Vector of_crc(uint32_t crc) {
  return _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(crc)));
}
KERNEL Vector of_fold(Fold fold) {
  return _mm256_broadcastsi128_si256(
      _mm_set_epi64x(static_cast<int64_t>(fold.high), static_cast<int64_t>(fold.low)));
}
KERNEL Vector add(Vector one, Vector other) { return _mm256_xor_si256(one, other); }
KERNEL Vector fold(Vector sum, Vector factors, Vector next) {
  return add(next, add(_mm256_clmulepi64_epi128(sum, factors, 0x00),
                       _mm256_clmulepi64_epi128(sum, factors, 0x11)));
}

#include "kernel_fold.h"
#include "kernel_loop.h"

#undef KERNEL
#undef ENTRY

}  // namespace vpclmul256

namespace vpclmul512 {

#define KERNEL \
  __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq"), always_inline)) inline
#define ENTRY __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq")))

using Vector = __m512i;
inline constexpr size_t kVectors = 4, kBlockBytes = kVectors * sizeof(Vector);

KERNEL Vector load(const std::byte* from) { return _mm512_loadu_si512(from); }
KERNEL void keep(Vector* vector) { asm volatile("" : "+v"(*vector)); }
KERNEL void store(std::byte* to, Vector vector) { _mm512_storeu_si512(to, vector); }
KERNEL void stream(std::byte* to, Vector vector) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), vector);
}
KERNEL void prefetch(const std::byte* from) {
  UNROLLED
  for (size_t line = 0; line < kBlockBytes; line += kLineBytes) {
    __builtin_prefetch(from + 4096 + line);
  }
}
KERNEL Vector of_crc(uint32_t crc) {
  return _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc)));
}
KERNEL Vector of_fold(Fold fold) {
  const auto high = static_cast<int64_t>(fold.high), low = static_cast<int64_t>(fold.low);
  return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}
KERNEL Vector add(Vector one, Vector other) { return _mm512_xor_si512(one, other); }
KERNEL Vector fold(Vector sum, Vector factors, Vector next) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, factors, 0x00),
                                   _mm512_clmulepi64_epi128(sum, factors, 0x11), next, kXorOfThree);
}

#include "kernel_fold.h"
#include "kernel_loop.h"

#undef KERNEL
#undef ENTRY

}  // namespace vpclmul512

#endif

// Those of all sets, from the widest; what the architecture does not have has none.
template <typename Hook>
constexpr auto make_all() {
  return std::array{
#if defined(__x86_64__)
      vpclmul512::make_kernels<Hook>(), vpclmul256::make_kernels<Hook>(),
      pclmul::make_kernels<Hook>(), crc32::make_kernels<Hook>(),
#else
      Kernels{}, Kernels{}, Kernels{}, Kernels{},
#endif
      portable::make_kernels<Hook>()};
}

}  // namespace lightckpt::kernel_sets
