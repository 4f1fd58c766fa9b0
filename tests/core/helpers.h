// What the core's tests share: bytes from a seed, statuses as assertions, folders that go away, and
// forked children that talk. Every wait here ends at kDeadline, and none of them sleeps.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "status.h"

namespace lightckpt {

using Buffer = std::vector<std::byte>;

inline constexpr std::chrono::seconds kDeadline{120};

inline Buffer random_bytes(uint64_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  Buffer buffer(bytes);
  for (uint64_t at = 0; at < bytes; at += 8) {
    const uint64_t word = random();
    std::memcpy(buffer.data() + at, &word, std::min<uint64_t>(8, bytes - at));
  }
  return buffer;
}

inline testing::AssertionResult is_ok(const Status& status) {
  if (status.ok()) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "code " << static_cast<int>(status.code()) << ": " << status.message();
}

// The status has this code, and its message names `what`.
inline testing::AssertionResult fails(const Status& status, Code code,
                                      const std::string& what = "") {
  const bool as_said = status.message().find(what) != std::string::npos;
  if (status.code() == code && as_said && !status.message().empty()) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << "code " << static_cast<int>(status.code()) << ": \"" << status.message()
         << "\", not code " << static_cast<int>(code) << " with \"" << what << "\"";
}

// tmpfs where there is one.
inline std::filesystem::path memory_folder() {
  const std::filesystem::path folder = "/dev/shm";
  return std::filesystem::is_directory(folder) ? folder : std::filesystem::temp_directory_path();
}

class TempFolder {
 public:
  explicit TempFolder(const std::filesystem::path& below = std::filesystem::temp_directory_path()) {
    std::string name = (below / "lightckpt_test_XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// A forked child that runs `body` and exits with what it returns. Parent and child use the same
// object, each its own end: signal() here is what hear() waits for there.
class Child {
 public:
  explicit Child(const std::function<int(Child&)>& body) {
    CHECK(pipe(to_child_) == 0 && pipe(to_parent_) == 0);
    parent_ = getpid();
    pid_ = fork();
    CHECK(pid_ >= 0);
    close(pid_ == 0 ? to_child_[1] : to_child_[0]);
    close(pid_ == 0 ? to_parent_[0] : to_parent_[1]);
    if (pid_ != 0) return;
    alarm(kDeadline.count());
    _exit(body(*this));
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (getpid() != parent_) return;
    if (!reaped_) {
      kill();
      exit_code();
    }
    close(to_child_[1]);
    close(to_parent_[0]);
  }

  pid_t pid() const { return pid_; }
  void signal() {
    const char word = 'x';
    CHECK(write(pid_ == 0 ? to_parent_[1] : to_child_[1], &word, 1) == 1);
  }
  // False if the other side is gone, or the deadline passed.
  bool hear() {
    const int fd = pid_ == 0 ? to_child_[0] : to_parent_[0];
    struct pollfd ready = {fd, POLLIN, 0};
    char word = 0;
    return poll(&ready, 1, kDeadline / std::chrono::milliseconds(1)) == 1 &&
           read(fd, &word, 1) == 1;
  }
  void kill() { ::kill(pid_, SIGKILL); }
  // Waits for the end: what the body returned, or minus the signal that ended it.
  int exit_code() {
    int state = 0;
    CHECK(waitpid(pid_, &state, 0) == pid_);
    reaped_ = true;
    return WIFEXITED(state) ? WEXITSTATUS(state) : -WTERMSIG(state);
  }

 private:
  int to_child_[2];
  int to_parent_[2];
  pid_t parent_;
  pid_t pid_;
  bool reaped_ = false;
};

}  // namespace lightckpt
