// Forks. Goal: a child finds nothing held by a thread that it does not have, and keeps no
// descriptor that stands for something held. Method: forks beside threads that open, close and lock
// all the time; each child does that itself, and ends by a signal if it hangs. Nothing here
// allocates in a child: the sanitizer's own allocator may be held by a thread that it does not
// have.
//
// Elsewhere: children of whole processes that are busy with stores, in kill/test_forks.py.
#include "fork.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <array>
#include <latch>
#include <thread>

#include "helpers.h"

namespace lightckpt {
namespace {

constexpr int kForks = 50;

// Threads that do `work` over and over until this goes, and have begun when it is made.
class Busy {
 public:
  explicit Busy(const std::function<void()>& work) {
    std::latch begun(2);
    for (std::jthread& thread : threads_) {
      thread = std::jthread([&begun, work](std::stop_token stop) {
        work();
        begun.count_down();
        while (!stop.stop_requested()) work();
      });
    }
    begun.wait();
  }

 private:
  std::array<std::jthread, 2> threads_;
};

TEST(Fork, a_child_may_open_close_and_lock_whatever_other_threads_did) {
  const auto work = [] {
    Descriptor first, second;
    CHECK(first.open("/dev/null", O_RDONLY) == 0 && second.open("/dev/null", O_RDONLY) == 0);
    first.close();
    const ForkLock lock;
  };
  const Busy busy(work);
  for (int i = 0; i < kForks; ++i) {
    Child child([&](Child&) {
      work();
      return 0;
    });
    ASSERT_EQ(child.exit_code(), 0) << "fork " << i;
  }
}

TEST(Fork, a_child_has_none_of_the_descriptors_and_may_use_the_objects) {
  Descriptor kept, closed, reopened;
  for (Descriptor* descriptor : {&kept, &closed, &reopened}) {
    ASSERT_EQ(descriptor->open("/dev/null", O_RDONLY), 0);
  }
  closed.close();
  ASSERT_EQ(reopened.open("/dev/zero", O_RDONLY), 0);
  const std::array<int, 2> numbers = {kept.get(), reopened.get()};
  Child child([&](Child&) {
    for (int number : numbers) {
      if (fcntl(number, F_GETFD) != -1) return 1;
    }
    if (kept.get() != -1 || reopened.get() != -1) return 2;
    if (kept.open("/dev/null", O_RDONLY) != 0 || kept.get() < 0) return 3;
    kept.close();
    return 0;
  });
  EXPECT_EQ(child.exit_code(), 0);
  for (int number : numbers) EXPECT_EQ(fcntl(number, F_GETFD), FD_CLOEXEC) << "the parent's";
}

TEST(Fork, an_open_that_fails_says_why_and_leaves_nothing) {
  Descriptor descriptor;
  EXPECT_EQ(descriptor.open("/no/such/file", O_RDONLY), ENOENT);
  EXPECT_EQ(descriptor.get(), -1);
}

// As a driver does that starts a helper while it is loaded.
TEST(Fork, whoever_holds_forks_back_may_fork) {
  const ForkLock lock;
  Child child([](Child&) { return 0; });
  EXPECT_EQ(child.exit_code(), 0);
}

TEST(Fork, of_two_threads_that_load_at_once_both_get_the_first_that_was_made) {
  static std::atomic<const int*> kept = nullptr;
  std::latch both(2);
  std::array<const int*, 2> seen = {};
  {
    std::array<std::jthread, 2> threads;
    for (size_t i = 0; i < threads.size(); ++i) {
      threads[i] = std::jthread([&, i] {
        seen[i] = &load_once(&kept, [&] {
          both.arrive_and_wait();  // neither is done before the other has begun
          return std::make_unique<const int>(static_cast<int>(i));
        });
      });
    }
  }
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_EQ(&load_once(&kept, []() -> std::unique_ptr<const int> { std::abort(); }), seen[0]);
}

}  // namespace
}  // namespace lightckpt
