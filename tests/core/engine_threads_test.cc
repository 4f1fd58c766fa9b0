// The engine and many threads. Goal: what its header says may be called from any thread may be, all
// at once, and every byte still arrives. Method: threads that submit, wait, read and look while a
// trainer makes version after version; the thread sanitizer sees what luck hides. Loops are bounded
// by work, never by time.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <fstream>
#include <optional>

#include "engine_helpers.h"

namespace lightckpt {
namespace {

constexpr int kThreads = 4;
const std::vector<uint64_t> kSizes = {5000, 0, 300, 70'000, 1};

// Joins when it goes, so that a failed assertion ends the test and not the process.
class Threads {
 public:
  ~Threads() { join(); }
  template <typename Body>
  void start(Body body) {
    threads_.emplace_back(body);
  }
  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  std::vector<std::thread> threads_;
};

TEST(EngineThreads, many_wait_for_one_batch_and_all_get_its_report) {
  TestEngine engine(1);
  const State state = State::of(1, kSizes);
  Gate gate(at_copy);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  engine.media->set_trace(&gate);
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, spans_of(state), &batch)));
  ASSERT_TRUE(gate.wait_held());
  {
    Threads threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.start([&] {
        Report report;
        EXPECT_TRUE(is_ok(engine.wait(batch, &report)));
        EXPECT_EQ(report.bytes, 75'301u);
      });
    }
    gate.open();
  }
  EXPECT_TRUE(is_ok(engine.commit(state)));
}

TEST(EngineThreads, many_submit_parts_of_one_version) {
  TestEngine engine(3);
  for (uint64_t step = 1; step <= 5; ++step) {
    const State state = State::of(step, std::vector<uint64_t>(64, 3000));
    const std::vector<Span> spans = spans_of(state);
    ASSERT_TRUE(is_ok(engine.begin(state)));
    {
      Threads threads;
      for (size_t thread = 0; thread < kThreads; ++thread) {
        threads.start([&, thread] {
          std::vector<uint64_t> batches;
          for (size_t i = thread; i < spans.size(); i += kThreads) {
            EXPECT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans[i]}, &batches.emplace_back())));
          }
          for (uint64_t batch : batches) EXPECT_TRUE(is_ok(engine.wait(batch)));
        });
      }
    }
    ASSERT_TRUE(is_ok(engine.commit(state)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  }
}

TEST(EngineThreads, versions_are_read_while_the_next_are_made) {
  TestEngine engine(2);
  const State first = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(engine.save(first)));
  ASSERT_TRUE(is_ok(engine.store()->pin(1, true)));
  std::atomic<bool> stop = false;
  Threads threads;
  for (int i = 0; i < 2; ++i) {
    threads.start([&] {
      while (!stop) {
        State back = blank(first);
        EXPECT_TRUE(is_ok(engine.run(Op::kRead, 1, back)));
        EXPECT_EQ(back.extents, first.extents);
      }
    });
  }
  for (uint64_t step = 2; step <= 30; ++step) {
    const State state = State::of(step, kSizes);
    EXPECT_TRUE(is_ok(engine.save(state)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  }
  stop = true;
}

TEST(EngineThreads, anybody_may_look_at_any_time) {
  TestEngine engine(2);
  ASSERT_TRUE(is_ok(engine.save(State::of(1, kSizes))));
  std::atomic<bool> stop = false;
  Threads threads;
  threads.start([&] {
    while (!stop) {
      const Engine::Counters counters = engine->counters();
      EXPECT_LE(counters.drops, counters.commits + 1);
      const uint64_t free_bytes = engine.store()->free_bytes();  // first: the media only grows
      EXPECT_LE(free_bytes, engine.media->size());
    }
  });
  threads.start([&] {
    while (!stop) {
      for (const Version& version : engine.store()->versions()) {
        EXPECT_TRUE(version.damage.ok());
        EXPECT_FALSE(engine.store()->pinned_elsewhere(version.index));
      }
    }
  });
  for (uint64_t step = 2; step <= 40; ++step) {
    // Larger and larger, so that the media grows while others look at its size.
    EXPECT_TRUE(is_ok(engine.save(State::of(step, {step * 5000, 300}))));
    EXPECT_TRUE(is_ok(engine.store()->pin(step, true)));
    EXPECT_TRUE(is_ok(engine.store()->pin(step, false)));
  }
  stop = true;
}

TEST(EngineThreads, pins_may_be_looked_at_while_they_change) {
  TestEngine engine(1);
  ASSERT_TRUE(is_ok(engine.save(State::of(1, kSizes))));
  const uint32_t slot = engine.latest().index;
  std::atomic<bool> stop = false;
  Threads threads;
  threads.start([&] {
    uint64_t seen = 0;
    while (!stop) seen += engine.store()->pinned_here(slot) ? 1 : 0;
    EXPECT_LT(seen, UINT64_MAX);
  });
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(is_ok(engine.store()->pin(1, true)));
    EXPECT_TRUE(is_ok(engine.store()->pin(1, false)));
  }
  stop = true;
}

TEST(EngineThreads, a_store_on_a_file_grows_while_versions_are_read) {
  TempFolder folder(memory_folder());
  StoreOptions options;
  options.create = true;
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(Store::open(folder.file("store"), options, &store)));
  Engine engine(std::move(store), 2);
  const auto run = [&](Op op, uint64_t version, const State& state) {
    uint64_t batch = 0;
    Report report;
    RETURN_IF_ERROR(engine.submit(op, version, spans_of(state), &batch));
    return engine.wait(batch, kDeadlineNs, &report);
  };
  const auto save = [&](const State& state) {
    uint64_t batch = 0;
    Report report;
    RETURN_IF_ERROR(engine.begin(state.step, 1, state.sizes(), state.blob, state.host.size()));
    RETURN_IF_ERROR(run(Op::kWrite, 0, state));
    RETURN_IF_ERROR(engine.queue_commit(state.host, &batch));
    return engine.wait(batch, kDeadlineNs, &report);
  };
  const State first = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(save(first)));
  ASSERT_TRUE(is_ok(engine.store().pin(1, true)));
  std::atomic<bool> stop = false;
  Threads threads;
  threads.start([&] {
    while (!stop) {
      State back = blank(first);
      EXPECT_TRUE(is_ok(run(Op::kRead, 1, back)));
      EXPECT_EQ(back.extents, first.extents);
    }
  });
  for (uint64_t step = 2; step <= 20; ++step) {
    EXPECT_TRUE(is_ok(save(State::of(step, {step * 30'000}))));
  }
  stop = true;
}

TEST(EngineThreads, drops_and_begins_cross_batches_of_others) {
  TestEngine engine(3);
  const State first = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(engine.save(first)));
  std::atomic<bool> stop = false;
  Threads threads;
  threads.start([&] {
    while (!stop) {
      uint64_t batch = 0;
      State back = blank(first);
      EXPECT_TRUE(is_ok(engine.submit(Op::kCopy, 1, spans_of(back), &batch)));
      EXPECT_TRUE(is_ok(engine.wait(batch)));
    }
  });
  const State state = State::of(2, std::vector<uint64_t>(50, 20'000));
  const std::vector<Span> spans = spans_of(state);
  for (int round = 0; round < 50; ++round) {
    EXPECT_TRUE(is_ok(engine.begin(state)));
    std::vector<uint64_t> batches(5);
    for (size_t i = 0; i < batches.size(); ++i) {
      const std::vector<Span> part(spans.begin() + 10 * i, spans.begin() + 10 * (i + 1));
      EXPECT_TRUE(is_ok(engine.submit(Op::kWrite, 0, part, &batches[i])));
    }
    EXPECT_TRUE(is_ok(engine->drop(kDeadlineNs)));
    for (uint64_t batch : batches) {
      const Status status = engine.wait(batch);
      EXPECT_TRUE(status.ok() || fails(status, Code::kInvalid, "given up"));
    }
  }
  stop = true;
  threads.join();
  EXPECT_EQ(engine.listed(), "1.0");
  EXPECT_TRUE(holds(engine.store(), engine.latest(), first));
}

TEST(EngineThreads, workers_leave_signals_to_the_trainer) {
  TestEngine engine(1);
  const State state = State::of(1, kSizes);
  struct Look final : MediaTrace {
    void on_event(const MediaEvent&) override { pthread_sigmask(SIG_BLOCK, nullptr, &blocked); }
    sigset_t blocked;
  } look;
  ASSERT_TRUE(is_ok(engine.begin(state)));
  engine.media->set_trace(&look);
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, spans_of(state), &batch)));
  ASSERT_TRUE(is_ok(engine.until_done(batch)));
  for (int asynchronous : {SIGINT, SIGTERM, SIGUSR1, SIGALRM, SIGCHLD}) {
    EXPECT_EQ(sigismember(&look.blocked, asynchronous), 1) << asynchronous;
  }
  for (int fault : {SIGBUS, SIGSEGV}) EXPECT_EQ(sigismember(&look.blocked, fault), 0) << fault;
  engine.media->set_trace(nullptr);
}

// Returns whether `wait` ends for a batch that no worker can take, within `timeout_ns`.
bool takes_part(Granularity granularity, int64_t timeout_ns) {
  TestEngine engine(1, granularity);
  const State state = State::of(1, {1000, 1000});
  const std::vector<Span> spans = spans_of(state);
  EXPECT_TRUE(is_ok(engine.begin(state)));
  std::atomic<int> copies{0};
  Gate gate([&](const MediaEvent& event) { return at_copy(event) && copies++ == 0; });
  engine.media->set_trace(&gate);
  uint64_t held = 0, other = 0;
  EXPECT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans[0]}, &held)));
  EXPECT_TRUE(gate.wait_held());
  EXPECT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans[1]}, &other)));
  Report report;
  const Status status = engine->wait(other, timeout_ns, &report);
  EXPECT_TRUE(status.ok() || fails(status, Code::kTimeout));
  gate.open();
  EXPECT_TRUE(is_ok(engine.wait(held)));
  EXPECT_TRUE(is_ok(engine.wait(other)));
  EXPECT_TRUE(is_ok(engine.commit(state)));
  engine.media->set_trace(nullptr);
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  return status.ok();
}

TEST(EngineThreads, who_waits_for_a_copy_takes_part_in_it) {
  EXPECT_TRUE(takes_part(Granularity::kVolatile, kDeadlineNs));
  EXPECT_TRUE(takes_part(Granularity::kCacheLine, kDeadlineNs));
}

// Its first copy here outlasts the time that it was given: it does no second one.
TEST(EngineThreads, who_takes_part_looks_at_its_deadline_between_chunks) {
  constexpr int64_t kTimeoutNs = 20'000'000;
  TestEngine engine(1);
  const State state = State::of(1, std::vector<uint64_t>(10, 65'536));
  const std::vector<Span> spans = spans_of(state);
  const std::thread::id waiting = std::this_thread::get_id();
  std::atomic<int> copies_here = 0;
  std::optional<Deadline> deadline;
  Gate gate([&](const MediaEvent& event) {
    if (!at_copy(event)) return false;
    if (std::this_thread::get_id() != waiting) return true;
    ++copies_here;
    while (!deadline->passed()) std::this_thread::yield();
    return false;
  });
  ASSERT_TRUE(is_ok(engine.begin(state)));
  engine.media->set_trace(&gate);
  uint64_t held = 0, batch = 0;
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans[0]}, &held)));
  ASSERT_TRUE(gate.wait_held());
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans.begin() + 1, spans.end()}, &batch)));
  Report report;
  Status status;
  do {  // again where this thread got no core in all that time, and so took no part
    deadline.emplace(2 * kTimeoutNs);  // passed when the wait's own has
    status = engine->wait(batch, kTimeoutNs, &report);
  } while (copies_here == 0);
  EXPECT_TRUE(fails(status, Code::kTimeout, "65536 bytes were"));
  EXPECT_EQ(copies_here, 1);
  gate.open();
  EXPECT_TRUE(is_ok(engine.wait(held)));
  EXPECT_TRUE(is_ok(engine.wait(batch)));
  EXPECT_TRUE(is_ok(engine.commit(state)));
  engine.media->set_trace(nullptr);
}

// A write that hangs there could not be given up in time.
TEST(EngineThreads, who_waits_for_a_disk_only_waits) {
  EXPECT_FALSE(takes_part(Granularity::kPage, 50'000'000));
}

}  // namespace
}  // namespace lightckpt
