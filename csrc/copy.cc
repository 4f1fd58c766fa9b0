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

constexpr size_t kBlockBytes = 4096;  // four checksum lanes; stays in the first-level cache

#if defined(__x86_64__)

void stream_lines_sse2(std::byte* target, const std::byte* source, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLineBytes) {
    for (size_t j = 0; j < kLineBytes; j += 16) {
      const auto* from = reinterpret_cast<const __m128i*>(source + i + j);
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i + j), _mm_loadu_si128(from));
    }
  }
}

__attribute__((target("avx"))) void stream_lines_avx(std::byte* target, const std::byte* source,
                                                     size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLineBytes) {
    const auto* from = reinterpret_cast<const __m256i*>(source + i);
    auto* to = reinterpret_cast<__m256i*>(target + i);
    const __m256i low = _mm256_loadu_si256(from);
    const __m256i high = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, low);
    _mm256_stream_si256(to + 1, high);
  }
}

void stream_lines(std::byte* target, const std::byte* source, size_t bytes) {
  static const bool has_avx = __builtin_cpu_supports("avx");
  if (has_avx) {
    stream_lines_avx(target, source, bytes);
  } else {
    stream_lines_sse2(target, source, bytes);
  }
}

void prefetch_block(const std::byte* source) {
  for (size_t i = 0; i < kBlockBytes; i += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(source + i), _MM_HINT_T0);
  }
}

#else

void stream_lines(std::byte* target, const std::byte* source, size_t bytes) {
  std::memcpy(target, source, bytes);
}

void prefetch_block(const std::byte*) {}

#endif

template <bool with_crc>
uint32_t copy_blocks(void* target, const void* source, size_t bytes) {
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  uint32_t crc = 0;
  const size_t misaligned = reinterpret_cast<uintptr_t>(to) % kLineBytes;
  const size_t head = std::min(bytes, misaligned == 0 ? 0 : kLineBytes - misaligned);
  if (head > 0) {
    std::memcpy(to, from, head);
    if (with_crc) crc = crc32c(crc, to, head);
    to += head, from += head, bytes -= head;
  }
  while (bytes >= kLineBytes) {
    const size_t lines = std::min(bytes, kBlockBytes) / kLineBytes * kLineBytes;
    if (bytes >= 2 * kBlockBytes) prefetch_block(from + kBlockBytes);
    if (with_crc) crc = crc32c(crc, from, lines);
    stream_lines(to, from, lines);
    to += lines, from += lines, bytes -= lines;
  }
  if (bytes > 0) {
    std::memcpy(to, from, bytes);
    if (with_crc) crc = crc32c(crc, to, bytes);
  }
  return crc;
}

}  // namespace

void copy_nt(void* target, const void* source, size_t bytes) {
  copy_blocks<false>(target, source, bytes);
}

uint32_t copy_nt_crc(void* target, const void* source, size_t bytes) {
  return copy_blocks<true>(target, source, bytes);
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
