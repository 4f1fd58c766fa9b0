// Mutexes that a compiler can reason about: each member says which mutex guards it, each function
// which it needs, and clang's -Wthread-safety (make lint) refuses an access without it. libstdc++'s
// own mutexes carry no such words, so these wrap them. Other compilers see plain mutexes.
//
// The analysis looks at one function at a time, and a lambda is one: it does not know what its
// caller holds. So waits are loops here, not predicates, and so are searches that need the mutex.
//
// Threads: that is what it is for.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#ifdef __clang__
#define LIGHTCKPT_ANNOTATION(word) __attribute__((word))
#else
#define LIGHTCKPT_ANNOTATION(word)
#endif

#define CAPABILITY(name) LIGHTCKPT_ANNOTATION(capability(name))
#define SCOPED_CAPABILITY LIGHTCKPT_ANNOTATION(scoped_lockable)
// Of a member: it is touched only with the mutex held.
#define GUARDED_BY(mutex) LIGHTCKPT_ANNOTATION(guarded_by(mutex))
// Of a function: it is called with these held, or without.
#define REQUIRES(...) LIGHTCKPT_ANNOTATION(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) LIGHTCKPT_ANNOTATION(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) LIGHTCKPT_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) LIGHTCKPT_ANNOTATION(release_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(mutex) LIGHTCKPT_ANNOTATION(assert_capability(mutex))

namespace lightckpt {

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  // For a lambda that is called at once, by a function that knows nothing of this: it is believed.
  void is_held() const ASSERT_CAPABILITY(this) {}

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex while it lives, or until it is let go for a while.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  ~MutexLock() RELEASE() {}

 private:
  friend class CondVar;
  std::unique_lock<std::mutex> lock_;
};

// Every wait may end without a reason: its caller looks again.
class CondVar {
 public:
  void wait(MutexLock& lock) { condition_.wait(lock.lock_); }
  void wait_for(MutexLock& lock, std::chrono::nanoseconds at_most) {
    condition_.wait_for(lock.lock_, at_most);
  }
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace lightckpt
