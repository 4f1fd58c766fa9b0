// Reserving, mapping and mapping again. See mapping.h.
#include "mapping.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

namespace lightckpt {
namespace {

constexpr uint64_t round_up(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

Mapping::~Mapping() {
  guard_.release();
  if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
}

bool Mapping::reserve(const How& how, uint64_t bytes) {
  // Aligned, so that huge pages can be used where the file system has them.
  const uint64_t alignment = std::max(kHugePage, how.unit);
  void* reserved = mmap(nullptr, bytes + alignment, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return false;
  if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
  how_ = how;
  reserved_ = reserved;
  reserved_bytes_ = bytes + alignment;
  base_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(reserved_), alignment));
  if (!how.inherited) madvise(reserved_, reserved_bytes_, MADV_DONTFORK);
  return true;
}

bool Mapping::map(uint64_t from, uint64_t to) {
  if (from >= to) return true;
  void* const wanted = base_ + from;
  if (mmap(wanted, to - from, how_.protection, how_.flags | MAP_FIXED, how_.fd,
           static_cast<off_t>(from)) == MAP_FAILED) {
    return false;
  }
  if (!how_.inherited) madvise(wanted, to - from, MADV_DONTFORK);
  if (how_.huge_pages) madvise(wanted, to - from, MADV_HUGEPAGE);
  return true;
}

bool Mapping::extend(uint64_t bytes) {
  if (!map(round_up(bytes_, how_.unit), bytes)) return false;
  bytes_ = bytes;
  guard_.protect(base_, bytes, how_.protection, how_.cuttable ? how_.fd : -1);
  return true;
}

bool Mapping::renew() {
  // In this order: a page that is replaced meanwhile is counted, if once too often.
  guard_.forget();
  if (map(0, bytes_)) return true;
  const int error = errno;
  guard_.trip();
  errno = error;
  return false;
}

void Mapping::drop(uint64_t offset, uint64_t bytes) {
  madvise(base_ + offset / how_.unit * how_.unit, bytes, MADV_DONTNEED);
}

}  // namespace lightckpt
