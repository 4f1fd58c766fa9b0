// EmulatedMedia: a file that stands in for persistent memory, and is slow, or stalls, on request.
//
// Asked for as `emulated`, any file is mapped and flushed as persistent memory is. Two variables of
// the environment, read as it is opened, make it behave like one that is not quick:
//
//   LIGHTCKPT_EMULATED_WRITE_RATE   bytes per second. A module of Optane takes about 2 GB/s
//       (Izraelevitz and others, Basic Performance Measurements of the Intel Optane DC Persistent
//       Memory Module, 2019), and a core's stores come quicker. The core meets that as stores that
//       do not retire, so here it stays busy as well until what it wrote would have been taken; a
//       sleep would give the core to training, and flatter us. For benchmarks.
//   LIGHTCKPT_EMULATED_GATE   a file, the gate. Each copy takes a shared lock on it (flock) and
//       lets it go before it touches the media: while somebody holds the exclusive one, the gate is
//       closed, and every copy stands still. For tests of what takes too long.
//
// Only copies and a device's writes are held up; the other accesses are few. Threads: any; they
// share the rate and the gate.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "file_media.h"

namespace lightckpt {

class EmulatedMedia final : public FileMedia {
 public:
  EmulatedMedia(std::string path, int fd) : FileMedia(std::move(path), fd) {}
  ~EmulatedMedia() override;

  bool may_stall() const override { return gate_ >= 0; }

 protected:
  // kInvalid names the variable that makes no sense.
  Status take_settings() override;
  void before_copy() override;
  void after_copy(uint64_t bytes) override;

 private:
  Status take_rate();
  Status take_gate();

  uint64_t bytes_per_second_ = 0;      // 0: as many as come
  std::atomic<int64_t> taken_ns_ = 0;  // when all so far will have been
  int gate_ = -1;                      // -1: there is none
};

}  // namespace lightckpt
