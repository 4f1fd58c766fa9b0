// Cache-line write-back, and the copies by their public names. See copy.h. On other processors than
// x86-64 copies are plain, and persistent memory is refused when the media is opened, so write_back
// is never asked for.
#include "copy.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace lightckpt {

void copy_nt(void* target, const void* source, size_t bytes) {
  (void)kernels().copy(static_cast<std::byte*>(target), static_cast<const std::byte*>(source),
                       bytes, 0);
}

uint32_t copy_nt_crc(void* target, const void* source, size_t bytes, uint32_t crc) {
  return kernels().copy_sum(static_cast<std::byte*>(target), static_cast<const std::byte*>(source),
                            bytes, crc);
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
