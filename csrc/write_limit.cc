// The bucket. See write_limit.h.
#include "write_limit.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>

namespace lightckpt {
namespace {

constexpr char kVariable[] = "LIGHTCKPT_EMULATED_WRITE_RATE";
// What the module's own buffer takes at once.
constexpr int64_t kBufferedNs = 10'000;

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

}  // namespace

Status WriteLimit::take_environment() {
  const char* const words = std::getenv(kVariable);
  if (words == nullptr) return {};
  const std::string_view text(words);
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), bytes_per_second_);
  if (error != std::errc() || end != text.data() + text.size() || bytes_per_second_ == 0) {
    return {Code::kInvalid, std::string(kVariable) + " is '" + words +
                                "', not a number of bytes per second above 0"};
  }
  return {};
}

void WriteLimit::wrote(uint64_t bytes) {
  if (bytes_per_second_ == 0) return;
  const auto cost = static_cast<int64_t>(static_cast<double>(bytes) * 1e9 /
                                         static_cast<double>(bytes_per_second_));
  int64_t taken = taken_ns_.load(std::memory_order_relaxed);
  int64_t until = 0;
  do {
    until = std::max(taken, now_ns() - kBufferedNs) + cost;
  } while (!taken_ns_.compare_exchange_weak(taken, until, std::memory_order_relaxed));
  while (now_ns() < until) {
  }
}

}  // namespace lightckpt
