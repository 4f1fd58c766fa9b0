// Asking the kernel for pages, and about them. See fake_pages.h.
#include "fake_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <new>
#include <sstream>
#include <string>

namespace fake_cuda {
namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr std::align_val_t kPage{kPageBytes};

uint64_t whole_pages(uint64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

// One line of /proc/self/maps: "begin-end rwxp ...".
struct Line {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::string protection;
};

bool parse(const std::string& text, Line* line) {
  std::istringstream words(text);
  char dash = 0;
  words >> std::hex >> line->begin >> dash >> line->end >> line->protection;
  return static_cast<bool>(words) && line->protection.size() >= 2;
}

// Is there a page behind the address? One that is behind the end of its file is not. A kernel that
// cannot tell (before 5.14) is believed to have it.
bool has_page(uint64_t address, bool writable) {
#ifdef MADV_POPULATE_WRITE
  void* const page = reinterpret_cast<void*>(address / kPageBytes * kPageBytes);
  const int how = writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  return madvise(page, kPageBytes, how) == 0 || errno == EINVAL;
#else
  return address > 0 || writable;
#endif
}

}  // namespace

Memory new_memory(uint64_t bytes, bool on_device) {
  Memory memory;
  memory.bytes = bytes;
  memory.host = static_cast<std::byte*>(::operator new(bytes, kPage));
  memory.address = reinterpret_cast<uint64_t>(memory.host);
  if (!on_device) return memory;
  void* const nothing = mmap(nullptr, whole_pages(bytes), PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (nothing == MAP_FAILED) throw std::bad_alloc();
  memory.address = reinterpret_cast<uint64_t>(nothing);
  return memory;
}

void free_memory(const Memory& memory) {
  if (memory.address != reinterpret_cast<uint64_t>(memory.host)) {
    munmap(reinterpret_cast<void*>(memory.address), whole_pages(memory.bytes));
  }
  ::operator delete(memory.host, kPage);
}

Mapped how_mapped(uint64_t address, uint64_t bytes) {
  std::ifstream maps("/proc/self/maps");
  Mapped worst = Mapped::kToWrite;
  uint64_t at = address;
  const uint64_t end = address + bytes;
  // The lines ascend, and what a range lies in follows one another without a hole.
  for (std::string text; at < end && std::getline(maps, text);) {
    Line line;
    if (!parse(text, &line) || line.end <= at) continue;
    if (line.begin > at || line.protection[0] != 'r') return Mapped::kNo;
    const bool writable = line.protection[1] == 'w';
    at = std::min(end, line.end);
    if (!has_page(at - 1, writable)) return Mapped::kNo;
    if (!writable) worst = Mapped::kToRead;
  }
  return at < end ? Mapped::kNo : worst;
}

}  // namespace fake_cuda
