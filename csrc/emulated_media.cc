// A token bucket, and a gate. See emulated_media.h.
#include "emulated_media.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace lightckpt {
namespace {

constexpr char kRate[] = "LIGHTCKPT_EMULATED_WRITE_RATE";
constexpr char kGate[] = "LIGHTCKPT_EMULATED_GATE";
// What the module's own buffer takes at once.
constexpr int64_t kBufferedNs = 10'000;

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

}  // namespace

std::unique_ptr<FileMedia> FileMedia::make(std::string path, int fd, MediaKind want) {
  if (want == MediaKind::kEmulated) return std::make_unique<EmulatedMedia>(std::move(path), fd);
  return std::unique_ptr<FileMedia>(new FileMedia(std::move(path), fd));
}

EmulatedMedia::~EmulatedMedia() {
  if (gate_ >= 0) close(gate_);
}

Status EmulatedMedia::take_settings() {
  RETURN_IF_ERROR(take_rate());
  return take_gate();
}

Status EmulatedMedia::take_rate() {
  const char* const words = std::getenv(kRate);
  if (words == nullptr) return {};
  const std::string_view text(words);
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), bytes_per_second_);
  if (error != std::errc() || end != text.data() + text.size() || bytes_per_second_ == 0) {
    return {Code::kInvalid,
            std::string(kRate) + " is '" + words + "', not a number of bytes per second above 0"};
  }
  return {};
}

Status EmulatedMedia::take_gate() {
  const char* const path = std::getenv(kGate);
  if (path == nullptr) return {};
  do {
    gate_ = ::open(path, O_RDONLY | O_CLOEXEC);
  } while (gate_ < 0 && errno == EINTR);
  if (gate_ >= 0) return {};
  return {Code::kInvalid, std::string(kGate) + " is '" + path +
                              "', which cannot be opened: " + std::strerror(errno)};
}

// Where a lock cannot be had at all (the kernel has no memory for it) there is nothing to wait for.
void EmulatedMedia::before_copy() {
  if (gate_ < 0) return;
  while (flock(gate_, LOCK_SH) != 0 && errno == EINTR) {
  }
  flock(gate_, LOCK_UN);
}

void EmulatedMedia::after_copy(uint64_t bytes) {
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
