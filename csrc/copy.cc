// See copy.h. On other processors than x86-64 copies are plain, and persistent memory is refused
// when the media is opened, so write_back is never asked for.
#include "copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "crc32c.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace lightckpt {
namespace {

constexpr size_t kBlockBytes = 4 * kCrcLaneBytes;

#if defined(__x86_64__)

// Whole blocks are copied in a pipeline of three stages, each a block behind the one before: while
// one block is fetched, the next is summed, and the one after that, now in the first-level cache,
// is streamed out. The stages are woven line by line, since one alone leaves the processor waiting.

// One weave's share of the first two stages: fetches four lines of the next block, and adds 64
// bytes of each lane of this one, from `at` on, to its chain.
__attribute__((target("sse4.2"), always_inline)) inline void sum_and_fetch(const std::byte* block,
                                                                           size_t at, bool sum,
                                                                           uint64_t (&chains)[4]) {
  for (size_t line = 0; line < 4; ++line) {
    _mm_prefetch(reinterpret_cast<const char*>(block + kBlockBytes + 4 * at + kLineBytes * line),
                 _MM_HINT_T0);
  }
  if (!sum) return;
  for (size_t i = at; i < at + kLineBytes; i += 8) {
    for (size_t lane = 0; lane < 4; ++lane) {
      uint64_t word;
      std::memcpy(&word, block + lane * kCrcLaneBytes + i, 8);
      chains[lane] = _mm_crc32_u64(chains[lane], word);
    }
  }
}

__attribute__((target("avx512f"), always_inline)) inline void stream_avx512(
    std::byte* target, const std::byte* source) {
  for (size_t i = 0; i < 4 * kLineBytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), _mm512_loadu_si512(source + i));
  }
}

__attribute__((target("avx"), always_inline)) inline void stream_avx(std::byte* target,
                                                                     const std::byte* source) {
  for (size_t i = 0; i < 4 * kLineBytes; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
  }
}

__attribute__((always_inline)) inline void stream_sse2(std::byte* target, const std::byte* source) {
  for (size_t i = 0; i < 4 * kLineBytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
  }
}

// One pipeline per instruction set; `target` is aligned to a line, `bytes` a multiple of a block.
#define DEFINE_COPY_BLOCKS(name, instructions, stream)                                             \
  __attribute__((target(instructions))) uint32_t name(std::byte* target, const std::byte* source,  \
                                                      size_t bytes, bool sum, uint32_t crc) {      \
    uint64_t first = ~crc;                                                                         \
    for (size_t at = 0; at <= bytes; at += kBlockBytes) {                                          \
      uint64_t chains[4] = {first, 0, 0, 0};                                                       \
      const bool last = at == bytes;                                                               \
      for (size_t i = 0; i < kCrcLaneBytes; i += kLineBytes) {                                     \
        if (!last) sum_and_fetch(source + at, i, sum, chains);                                     \
        if (at > 0) stream(target + at - kBlockBytes + 4 * i, source + at - kBlockBytes + 4 * i);  \
      }                                                                                            \
      if (sum && !last) {                                                                          \
        first =                                                                                    \
            crc32c_join_lanes(static_cast<uint32_t>(chains[0]), static_cast<uint32_t>(chains[1]),  \
                              static_cast<uint32_t>(chains[2]), static_cast<uint32_t>(chains[3])); \
      }                                                                                            \
    }                                                                                              \
    return ~static_cast<uint32_t>(first);                                                          \
  }

DEFINE_COPY_BLOCKS(copy_blocks_avx512, "sse4.2,avx512f", stream_avx512)
DEFINE_COPY_BLOCKS(copy_blocks_avx, "sse4.2,avx", stream_avx)
DEFINE_COPY_BLOCKS(copy_blocks_sse, "sse4.2", stream_sse2)
#undef DEFINE_COPY_BLOCKS

using CopyBlocks = uint32_t (*)(std::byte*, const std::byte*, size_t, bool, uint32_t);

uint32_t copy_blocks_plain(std::byte* target, const std::byte* source, size_t bytes, bool sum,
                           uint32_t crc) {
  if (sum) crc = crc32c(crc, source, bytes);
  for (size_t at = 0; at < bytes; at += 4 * kLineBytes) stream_sse2(target + at, source + at);
  return crc;
}

CopyBlocks best_copy_blocks() {
  if (__builtin_cpu_supports("avx512f")) return copy_blocks_avx512;
  if (__builtin_cpu_supports("avx")) return copy_blocks_avx;
  return __builtin_cpu_supports("sse4.2") ? copy_blocks_sse : copy_blocks_plain;
}

uint32_t copy_whole_blocks(std::byte* target, const std::byte* source, size_t bytes, bool sum,
                           uint32_t crc) {
  static const CopyBlocks copy_blocks = best_copy_blocks();
  return copy_blocks(target, source, bytes, sum, crc);
}

void stream_line(std::byte* target, const std::byte* source) {
  for (size_t i = 0; i < kLineBytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
  }
}

#else

uint32_t copy_whole_blocks(std::byte* target, const std::byte* source, size_t bytes, bool sum,
                           uint32_t crc) {
  std::memcpy(target, source, bytes);
  return sum ? crc32c(crc, target, bytes) : crc;
}

void stream_line(std::byte* target, const std::byte* source) {
  std::memcpy(target, source, kLineBytes);
}

#endif

uint32_t copy(void* target, const void* source, size_t bytes, bool sum) {
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  uint32_t crc = 0;
  const auto advance = [&](size_t done) { to += done, from += done, bytes -= done; };
  const auto copy_ragged = [&](size_t ragged) {
    std::memcpy(to, from, ragged);
    // Summed where it was put: what was copied, not what the source may have become.
    if (sum) crc = crc32c(crc, to, ragged);
    advance(ragged);
  };
  const size_t misaligned = reinterpret_cast<uintptr_t>(to) % kLineBytes;
  if (misaligned != 0) copy_ragged(std::min(bytes, kLineBytes - misaligned));
  const size_t blocks = bytes / kBlockBytes * kBlockBytes;
  if (blocks > 0) {
    crc = copy_whole_blocks(to, from, blocks, sum, crc);
    advance(blocks);
  }
  if (const size_t lines = bytes / kLineBytes * kLineBytes; lines > 0) {
    if (sum) crc = crc32c(crc, from, lines);
    for (size_t at = 0; at < lines; at += kLineBytes) stream_line(to + at, from + at);
    advance(lines);
  }
  if (bytes > 0) copy_ragged(bytes);
  return crc;
}

}  // namespace

void copy_nt(void* target, const void* source, size_t bytes) {
  (void)copy(target, source, bytes, false);
}

uint32_t copy_nt_crc(void* target, const void* source, size_t bytes) {
  return copy(target, source, bytes, true);
}

#if defined(__x86_64__)

FlushMethod best_flush_method() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) {
    if (ebx & 1u << 24) return FlushMethod::kClwb;
    if (ebx & 1u << 23) return FlushMethod::kClflushopt;
  }
  return FlushMethod::kClflush;
}

namespace {

__attribute__((target("clwb"))) void clwb_lines(uintptr_t line, uintptr_t end) {
  for (; line < end; line += kLineBytes) _mm_clwb(reinterpret_cast<void*>(line));
}

__attribute__((target("clflushopt"))) void clflushopt_lines(uintptr_t line, uintptr_t end) {
  for (; line < end; line += kLineBytes) _mm_clflushopt(reinterpret_cast<void*>(line));
}

void clflush_lines(uintptr_t line, uintptr_t end) {
  for (; line < end; line += kLineBytes) _mm_clflush(reinterpret_cast<const void*>(line));
}

}  // namespace

void write_back(FlushMethod method, const void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const uintptr_t line = begin / kLineBytes * kLineBytes;
  switch (method) {
    case FlushMethod::kClwb:
      return clwb_lines(line, begin + bytes);
    case FlushMethod::kClflushopt:
      return clflushopt_lines(line, begin + bytes);
    case FlushMethod::kClflush:
      return clflush_lines(line, begin + bytes);
    case FlushMethod::kNone:
    case FlushMethod::kMsync:
      return;
  }
}

void store_fence() { _mm_sfence(); }

#else

FlushMethod best_flush_method() { return FlushMethod::kNone; }

void write_back(FlushMethod, const void*, size_t) {}

void store_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

#endif

}  // namespace lightckpt
