// The count, by the address sanitizer's hooks: without it there is no limit. See allocations.h.
#include "allocations.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "status.h"

#if defined(__SANITIZE_ADDRESS__)
#define LIGHTCKPT_COUNTED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LIGHTCKPT_COUNTED
#endif
#endif

#ifdef LIGHTCKPT_COUNTED
// As in <sanitizer/allocator_interface.h>, which not every compiler brings along.
extern "C" int __sanitizer_install_malloc_and_free_hooks(
    void (*on_malloc)(const volatile void* memory, size_t bytes),
    void (*on_free)(const volatile void* memory));
extern "C" size_t __sanitizer_get_allocated_size(const volatile void* memory);
#endif

namespace lightckpt::fuzz {

#ifdef LIGHTCKPT_COUNTED
namespace {

thread_local bool limited = false;
thread_local uint64_t left = 0;

void on_malloc(const volatile void*, size_t bytes) {
  if (!limited) return;
  if (bytes > left) {
    limited = false;  // what follows asks for memory too
    std::fprintf(stderr, "asked for %zu bytes, %llu are left\n", bytes,
                 static_cast<unsigned long long>(left));
    std::abort();
  }
  left -= bytes;
}

void on_free(const volatile void* memory) {
  if (limited) left += __sanitizer_get_allocated_size(memory);
}

}  // namespace

AllocationLimit::AllocationLimit(uint64_t bytes) {
  static const int installed = __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
  CHECK(installed > 0);
  left = bytes;
  limited = true;
}
AllocationLimit::~AllocationLimit() { limited = false; }
#else
AllocationLimit::AllocationLimit(uint64_t) {}
AllocationLimit::~AllocationLimit() {}
#endif

}  // namespace lightckpt::fuzz
