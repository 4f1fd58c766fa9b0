// Upkeep. Goal: jobs are done one after the other; who waits for one waits no longer than he said,
// and it is done all the same; the end waits for the job in hand. Method: jobs that stand at a
// signal.
#include "upkeep.h"

#include <memory>

#include "test_media.h"

namespace lightckpt {
namespace {

constexpr int64_t kDeadlineNs = std::chrono::nanoseconds(kDeadline).count();

TEST(Upkeep, does_jobs_in_order_on_one_thread) {
  std::vector<int> done;
  std::vector<std::thread::id> threads;
  Upkeep upkeep;
  for (int i = 0; i < 10; ++i) {
    const auto job = [&, i] {
      done.push_back(i);
      threads.push_back(std::this_thread::get_id());
    };
    EXPECT_TRUE(upkeep.run(job, Deadline(kDeadlineNs)));
    EXPECT_EQ(done.size(), static_cast<size_t>(i) + 1) << "it said so before it was done";
  }
  EXPECT_EQ(done, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(std::ranges::count(threads, threads[0]), 10);
  EXPECT_NE(threads[0], std::this_thread::get_id());
}

TEST(Upkeep, a_wait_ends_and_the_job_goes_on) {
  Signal gate;
  bool first = false;
  bool second = false;
  Upkeep upkeep;
  const auto held = [&] {
    EXPECT_TRUE(gate.wait());
    first = true;
  };
  EXPECT_FALSE(upkeep.run(held, Deadline(1'000'000)));
  EXPECT_FALSE(upkeep.run([&] { second = first; }, Deadline(0)));
  gate.set();
  EXPECT_TRUE(upkeep.run([] {}, Deadline(kDeadlineNs)));
  EXPECT_TRUE(first);
  EXPECT_TRUE(second);
}

TEST(Upkeep, the_end_waits_for_the_job_in_hand) {
  Signal begun;
  Signal gate;
  bool done = false;
  auto upkeep = std::make_unique<Upkeep>();
  const auto held = [&] {
    begun.set();
    EXPECT_TRUE(gate.wait());
    done = true;
  };
  EXPECT_FALSE(upkeep->run(held, Deadline(0)));
  ASSERT_TRUE(begun.wait());
  std::thread opener([&] { gate.set(); });
  upkeep.reset();
  EXPECT_TRUE(done);
  opener.join();
}

}  // namespace
}  // namespace lightckpt
