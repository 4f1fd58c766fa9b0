// StoreLock: one writer for a store, and readers that hold on to single versions.
//
// Locks of open file descriptions (fcntl, F_OFD_SETLK) on the store's own inode, whatever it is
// called, far behind its bytes: byte 0 from kLockOffset on is the writer's, byte 1 + i is shared by
// readers of slot i, and the writer's alone while it retires that. The kernel releases them when
// the last descriptor of the description is closed, however that comes, so there is no stale lock
// to judge. Invariants:
//
//   1. Each handle has a description of its own, opened for locking only: handles of one process
//      exclude each other, and no other descriptor of the file that is closed drops anything. It is
//      never mapped (a mapping would keep it), and forked children close it (fork.h).
//   2. A shared lock is never a writer's: whoever may only read a store can place one, anywhere. On
//      the writer's byte it neither keeps a writer out nor stops it. That one goes in without the
//      lock, and tries again to get it; meanwhile the token in the store (holder.h) and the lock
//      file keep a second one out.
//   3. A handle stays with the file that it opened, and goes on only while that has its name.
//
// The lock file, PATH.lock, is a second lock: byte 0 is the writer's and byte 1 + i a reader's pin,
// as earlier releases have them, which look nowhere else. It also keeps two processes from making
// one store at once. Where it cannot be had (no right, a foreign user's, a link, a read-only
// folder) the store's own lock decides alone. Readers neither make nor open it.
//
// Threads: any.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "fork.h"
#include "status.h"
#include "thread_annotations.h"

namespace lightckpt {

inline constexpr uint32_t kLockSlotsMax = 64;
inline constexpr off_t kLockOffset = off_t{1} << 62;  // in the store; 0 in a lock file

class StoreLock {
 public:
  StoreLock() = default;
  StoreLock(const StoreLock&) = delete;
  StoreLock& operator=(const StoreLock&) = delete;
  ~StoreLock() { release(); }

  // Takes the lock file of the store at `path`, whether that is there yet or not. kBusy without
  // words if another writer has it; see holder_pid. True in `held` where it could be had.
  Status take_name(const std::string& path, bool* held);
  // Opens the store at `path`, which is no link; as writer also takes the writer's byte. kBusy as
  // above.
  Status open(const std::string& path, bool writer);
  // Gives up everything.
  void release();

  bool is_open() const { return store_.is_open(); }
  // Of the process that was in the way, where the kernel says: it holds the lock as earlier
  // releases do. Else 0.
  pid_t holder_pid() const { return holder_pid_; }
  // False for a writer that a reader is in the way of.
  bool alone() const { return alone_; }
  // Does a writer hold the lock file too?
  bool holds_name() const { return name_.is_open(); }
  // Is the open file `descriptor` the one that is locked?
  bool is_of(int descriptor) const;
  uint64_t inode() const { return inode_; }
  // The store has this name from now on.
  void set_path(const std::string& path) { path_ = path; }
  // Before anything is published or retired: is the file still the one that has its name, and did
  // no other writer come in where a reader was in the way? kLost if not, for good.
  Status check();

  // Shares slot `slot` until as many unpins, or until the process ends.
  Status pin(uint32_t slot);
  void unpin(uint32_t slot);
  uint32_t unpin_all(uint32_t slot);  // returns how many there were
  bool pinned_here(uint32_t slot) const { return pins_[slot] > 0; }
  // Does another handle, of this process or another, read slot `slot`?
  bool pinned_elsewhere(uint32_t slot) const;
  // Keeps readers out of slot `slot` while it is being retired; false if one is in already.
  bool try_seal(uint32_t slot);
  void unseal(uint32_t slot);

 private:
  // An open file, and the bytes of it that are locks.
  class File {
   public:
    explicit File(off_t first) : first_(first) {}
    Descriptor& descriptor() { return descriptor_; }
    bool is_open() const { return descriptor_.get() >= 0; }
    bool set(short type, uint32_t byte);
    // The lock that keeps `byte` from being locked alone: its type, F_UNLCK if none does.
    struct flock in_the_way(uint32_t byte) const;
    // The writer's byte: F_WRLCK if it was had, F_RDLCK if readers are in the way, F_UNLCK if a
    // writer is, whose pid is given where the kernel knows it. Negative: errno, negated.
    int take_writers(pid_t* holder_pid);
    void release();

   private:
    const off_t first_;
    Descriptor descriptor_;
  };

  File store_{kLockOffset};
  File name_{0};
  std::string path_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  bool alone_ = true;
  pid_t holder_pid_ = 0;
  Mutex mutex_;                                              // for the order of counts and locks
  uint64_t sealed_ GUARDED_BY(mutex_) = 0;                   // bit per slot
  std::array<std::atomic<uint32_t>, kLockSlotsMax> pins_{};  // looked at without the mutex
};

}  // namespace lightckpt
