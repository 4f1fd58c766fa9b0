// Mapping: the bytes of a file or device at an address that stays, however much it grows.
//
// Address space is reserved ahead, and the file is mapped into it piece by piece. All of it is
// guarded against SIGBUS. Threads: one at a time, but for drop and what the guard says.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sigbus.h"
#include "status.h"

namespace lightckpt {

inline constexpr uint64_t kHugePage = 2ull << 20;

class Mapping {
 public:
  struct How {
    int fd = -1;
    int protection = 0;
    int flags = 0;
    uint64_t unit = 0;        // of offsets and lengths
    bool inherited = false;   // by forked children
    bool huge_pages = false;  // where the file system has them
    bool cuttable = true;     // a file, whose length may change
  };

  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  // Takes address space for `bytes`; false, with errno, where there is none.
  bool reserve(const How& how, uint64_t bytes);
  // Maps the file up to `bytes`. A length that is no multiple of the unit takes the rest of its
  // last one along, so the next piece begins behind that.
  bool extend(uint64_t bytes);
  // Maps all of it once more: pages that the guard has replaced are the file's again.
  bool renew();
  // Gives up what was written to private pages: they show the file again.
  void drop(uint64_t offset, uint64_t bytes);

  std::byte* base() const { return base_; }
  const SigbusGuard& guard() const { return guard_; }

 private:
  bool map(uint64_t from, uint64_t to);

  How how_;
  void* reserved_ = nullptr;
  uint64_t reserved_bytes_ = 0;
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
  SigbusGuard guard_;
};

}  // namespace lightckpt
