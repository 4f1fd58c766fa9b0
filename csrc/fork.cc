// The one mutex that forks wait for, and the list of what a child closes. See fork.h.
#include "fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "status.h"

namespace lightckpt {
namespace {

constinit std::mutex fork_mutex;
constinit Descriptor* open_descriptors = nullptr;  // guarded by fork_mutex
// Does this thread hold it? A library that is called under it may fork (a driver's helper does).
constinit thread_local bool holds = false;
constinit thread_local bool holds_for_fork = false;

void before_fork() {
  if (holds) return;
  fork_mutex.lock();
  holds_for_fork = true;
}

void after_fork() {
  if (!holds_for_fork) return;
  holds_for_fork = false;
  fork_mutex.unlock();
}

}  // namespace

// In the child, which has this thread only. Nothing is unlocked: the locks are the parent's too.
void close_in_child() {
  while (Descriptor* descriptor = open_descriptors) {
    open_descriptors = descriptor->next_;
    ::close(descriptor->fd_);
    descriptor->fd_ = -1;
    descriptor->next_ = descriptor->previous_ = nullptr;
  }
  after_fork();
}

namespace {

// As the library is loaded: before there is anything to hold, and before it has threads.
[[gnu::constructor]] void watch_forks() {
  CHECK(pthread_atfork(before_fork, after_fork, close_in_child) == 0);
}

}  // namespace

ForkLock::ForkLock() {
  fork_mutex.lock();
  holds = true;
}

ForkLock::~ForkLock() {
  holds = false;
  fork_mutex.unlock();
}

int Descriptor::open(const std::string& path, int flags, mode_t mode) {
  close();
  // Opened and listed in one, as seen by a fork.
  ForkLock lock;
  do {
    fd_ = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0) return errno;
  next_ = open_descriptors;
  previous_ = nullptr;
  if (next_ != nullptr) next_->previous_ = this;
  open_descriptors = this;
  return 0;
}

void Descriptor::close() {
  if (fd_ < 0) return;
  ForkLock lock;
  (previous_ != nullptr ? previous_->next_ : open_descriptors) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
  ::close(fd_);
  fd_ = -1;
  next_ = previous_ = nullptr;
}

}  // namespace lightckpt
