// Forks: what of this library a forked child keeps, and that none of it is held by a thread that
// the child does not have.
//
// A child has one thread, and a copy of every global as it stood. So each global has a fork story:
//
//   1. What other threads change is an atomic that is whole at every instant, or is changed under
//      ForkLock, which the fork itself waits for and takes: in the child nobody holds it.
//   2. No function-local static has an initialiser that runs code, and there is no call_once: a
//      thread that the child lacks may be inside one. Libraries are loaded by load_once instead.
//   3. A descriptor that stands for something held (an open-file-description lock, which ends when
//      the last descriptor of it is closed) is a Descriptor, and the child closes it at once: a
//      loader's worker that outlives its trainer holds no store.
//   4. Handles and their mutexes are their process's; the ABI asks who is calling before it locks.
//
// What a child is that was made by a bare clone(2), none of the handlers here has seen: it keeps
// descriptors until it ends.
//
// Threads: any; a Descriptor is one thread's at a time.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <string>

namespace lightckpt {

// Holds back forks, and other holders. A fork by the holder itself goes on.
class ForkLock {
 public:
  ForkLock();
  ForkLock(const ForkLock&) = delete;
  ForkLock& operator=(const ForkLock&) = delete;
  ~ForkLock();
};

// A file descriptor that forked children and executed programs do not have.
class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(); }

  // Opens `path` as open(2) does, close-on-exec; returns 0 or errno.
  int open(const std::string& path, int flags, mode_t mode = 0);
  void close();
  // -1 where it is not open, as in a forked child.
  int get() const { return fd_; }

 private:
  friend void close_in_child();

  int fd_ = -1;
  Descriptor* next_ = nullptr;  // of those that are open
  Descriptor* previous_ = nullptr;
};

// What `make` made the first time, for as long as the process runs. Two threads that come first may
// both make one; the first that is done counts, and the other's goes.
template <typename Made, typename Make>
const Made& load_once(std::atomic<const Made*>* kept, const Make& make) {
  if (const Made* known = kept->load(std::memory_order_acquire)) return *known;
  std::unique_ptr<const Made> made = make();
  const Made* known = nullptr;
  if (kept->compare_exchange_strong(known, made.get(), std::memory_order_acq_rel)) {
    known = made.release();
  }
  return *known;
}

}  // namespace lightckpt
