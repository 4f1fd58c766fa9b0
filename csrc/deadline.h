// Deadline: the end of a wait, fixed when the wait begins. Whatever a call does before it waits, or
// between two waits, is taken off. Monotonic time.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

namespace lightckpt {

inline uint64_t now_ns() {  // CLOCK_MONOTONIC
  struct timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

class Deadline {
 public:
  // Below zero: never. No more than 36 years: INT64_MAX added to a clock would overflow, and so end
  // at once.
  explicit Deadline(int64_t timeout_ns)
      : timeout_ns_(std::min(timeout_ns, int64_t{1} << 60)),
        end_ns_(timeout_ns < 0 ? UINT64_MAX : now_ns() + uint64_t(timeout_ns_)) {}

  bool passed() const { return end_ns_ != UINT64_MAX && now_ns() >= end_ns_; }
  // What a wait is given; never less than nothing.
  std::chrono::nanoseconds left() const {
    if (end_ns_ == UINT64_MAX) return std::chrono::nanoseconds(int64_t{1} << 60);
    const uint64_t now = now_ns();
    return std::chrono::nanoseconds(now < end_ns_ ? int64_t(end_ns_ - now) : 0);
  }
  // "after 20 ms", for messages.
  std::string after() const { return "after " + std::to_string(timeout_ns_ / 1'000'000) + " ms"; }

 private:
  int64_t timeout_ns_;
  uint64_t end_ns_;
};

}  // namespace lightckpt
