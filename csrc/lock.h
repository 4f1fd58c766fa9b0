// StoreLock: one writer for a store, and readers that hold on to single versions.
//
// POSIX record locks on a file of its own beside the store: byte 0 is the writer's, byte 1 + i is
// shared by readers of slot i. The kernel releases them when the process ends, however it ends, and
// a forked child does not keep them (an flock would stay with an orphaned data-loader worker); so
// there is no stale lock to judge. Their trap is that closing any descriptor of the file drops all
// of a process's locks on it: each lock file is opened once per process and never closed. They do
// not exclude within a process either; the table of open lock files does that.
//
// Threads: any.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "status.h"

namespace lightckpt {

inline constexpr uint32_t kLockSlotsMax = 64;

class StoreLock {
 public:
  StoreLock() = default;
  StoreLock(const StoreLock&) = delete;
  StoreLock& operator=(const StoreLock&) = delete;
  ~StoreLock() { release(); }

  // Opens the lock file of `store_path`; as writer also takes byte 0, or says who holds it.
  Status acquire(const std::string& store_path, bool writer);
  // Gives up the writer's byte and this handle's pins.
  void release();

  // Shares slot `slot` until as many unpins, or until the process ends.
  Status pin(uint32_t slot);
  void unpin(uint32_t slot);
  uint32_t unpin_all(uint32_t slot);  // returns how many there were
  bool pinned_here(uint32_t slot) const { return pins_[slot] > 0; }
  // Does another handle of this process, or another process, read slot `slot`?
  bool pinned_elsewhere(uint32_t slot) const;
  // Keeps readers out of slot `slot` while it is being retired; false if one is in already.
  bool try_seal(uint32_t slot);
  void unseal(uint32_t slot);

 private:
  int entry_ = -1;  // in the process's table of lock files
  bool writer_ = false;
  // Counted, since holders may overlap; changed under the table's mutex, looked at without.
  std::array<std::atomic<uint32_t>, kLockSlotsMax> pins_{};
};

}  // namespace lightckpt
