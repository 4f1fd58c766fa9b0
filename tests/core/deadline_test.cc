// The end of a wait. Goal: it is fixed when the wait begins, and the ends of what an int64 holds
// are timeouts like any. Method: the clock itself, waited for until it has passed.
#include "deadline.h"

#include <gtest/gtest.h>

#include <thread>

namespace lightckpt {
namespace {

TEST(Deadline, what_was_done_before_a_wait_is_taken_off) {
  const Deadline deadline(3'000'000);
  while (!deadline.passed()) std::this_thread::yield();
  EXPECT_EQ(deadline.left().count(), 0) << "a wait that follows has nothing left";
  EXPECT_EQ(deadline.after(), "after 3 ms");
}

TEST(Deadline, what_is_left_never_grows) {
  const Deadline deadline(int64_t{3600} * 1'000'000'000);
  for (int i = 0; i < 1000; ++i) {
    const auto before = deadline.left();
    EXPECT_LE(deadline.left(), before);
    EXPECT_GT(before.count(), 0);
  }
}

TEST(Deadline, none_at_all_and_the_longest_never_pass) {
  for (const int64_t timeout_ns : {int64_t{-1}, INT64_MIN, INT64_MAX}) {
    const Deadline deadline(timeout_ns);
    EXPECT_FALSE(deadline.passed()) << timeout_ns;
    EXPECT_GT(deadline.left(), std::chrono::hours(24)) << timeout_ns;
  }
}

TEST(Deadline, no_time_is_over_at_once) {
  const Deadline deadline(0);
  EXPECT_TRUE(deadline.passed());
  EXPECT_EQ(deadline.left().count(), 0);
}

}  // namespace
}  // namespace lightckpt
