// What tests of StoreLock share: a file that stands for a store, and locks of others than
// StoreLock.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "helpers.h"
#include "lock.h"

namespace lightckpt {

inline constexpr uint32_t kSlot = 3;

// A descriptor of its own, and a lock on it that is the process's (an earlier release's) or not.
struct Foreign {
  Foreign(const std::string& path, int flags) : fd(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    CHECK(fd >= 0);
  }
  ~Foreign() { close(fd); }
  bool lock(short type, int command, off_t first, off_t bytes) const {
    struct flock range = {};
    range.l_type = type;
    range.l_start = first;
    range.l_len = bytes;
    return fcntl(fd, command, &range) == 0;
  }
  int fd;
};

struct Locks : testing::Test {
  Locks() { std::ofstream(store) << "a store"; }

  Status write(StoreLock* lock) {
    bool held = false;
    if (Status status = lock->take_name(store, &held); !status.ok()) return status;
    return lock->open(store, true);
  }
  // Runs in another process: can it become the writer?
  bool another_process_can_write() {
    Child child([&](Child&) {
      StoreLock lock;
      return write(&lock).ok() ? 1 : 0;
    });
    return child.exit_code() == 1;
  }

  TempFolder folder;
  std::string store = folder.file("store");
};

}  // namespace lightckpt
