// WriteLimit: a token bucket that makes emulated persistent memory as slow to write as a real one.
//
// A module of Optane takes about 2 GB/s (Izraelevitz and others, Basic Performance Measurements of
// the Intel Optane DC Persistent Memory Module, 2019), and a core's stores come quicker. The core
// meets that as stores that do not retire, so here it stays busy as well until what it wrote would
// have been taken; a sleep would give the core to training, and flatter us. For benchmarks.
// Threads: any; they share the rate.
#pragma once

#include <atomic>
#include <cstdint>

#include "status.h"

namespace lightckpt {

class WriteLimit {
 public:
  // As the environment says: bytes per second in LIGHTCKPT_EMULATED_WRITE_RATE, or no limit.
  Status take_environment();

  // Returns when `bytes`, and all that was written before, would have been taken.
  void wrote(uint64_t bytes);

 private:
  uint64_t bytes_per_second_ = 0;
  std::atomic<int64_t> taken_ns_ = 0;  // when all so far will have been
};

}  // namespace lightckpt
