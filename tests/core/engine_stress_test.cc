// The engine's queue under random lives and random delays. Goal: whatever order threads come in,
// a version that commit acknowledged has its own bytes, a reader gets what it asked for, and
// nothing hangs. Method: one trainer that begins, writes, checks, commits, drops and rebases as a
// seed says; readers and lookers beside it; and at each event of the media, on whatever thread, a
// pause that the seed chose: none, a yield, or some microseconds. Replay: LIGHTCKPT_STRESS_SEED=n.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "engine_helpers.h"

namespace lightckpt {
namespace {

constexpr int kRounds = 60;

uint64_t first_seed() {
  const char* seed = std::getenv("LIGHTCKPT_STRESS_SEED");
  return seed != nullptr ? std::strtoull(seed, nullptr, 10) : 1;
}

// Pauses threads at events of the media: each thread has its own row of choices.
class Delays final : public MediaTrace {
 public:
  explicit Delays(uint64_t seed) : seed_(seed) {}

  void on_event(const MediaEvent&) override {
    thread_local std::mt19937_64 random(seed_ + ++threads_);
    switch (random() % 8) {
      case 0:
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
        break;
      case 1:
      case 2:
        std::this_thread::yield();
        break;
      default:
        break;
    }
  }

 private:
  const uint64_t seed_;
  std::atomic<uint64_t> threads_ = 0;
};

// A trainer's life by a seed, and what must be true of it.
class Trainer {
 public:
  Trainer(TestEngine* engine, uint64_t seed) : engine_(*engine), random_(seed) {}

  void live() {
    for (int round = 0; round < kRounds && !testing::Test::HasFailure(); ++round) {
      switch (random_() % 6) {
        case 0:
          give_up();
          break;
        case 1:
          go_back();
          break;
        default:
          save();
      }
    }
  }

 private:
  State next_state() {
    std::vector<uint64_t> sizes(1 + random_() % 12);
    for (uint64_t& size : sizes) size = random_() % 4 == 0 ? 0 : random_() % 60'000;
    return State::of(++step_, sizes);
  }
  // In batches of one to four extents, some of them waited for before the next is queued.
  std::vector<uint64_t> write(const State& state) {
    const std::vector<Span> spans = spans_of(state);
    std::vector<uint64_t> batches;
    for (size_t at = 0; at < spans.size();) {
      const size_t count = std::min<size_t>(1 + random_() % 4, spans.size() - at);
      const std::vector<Span> part(spans.begin() + at, spans.begin() + at + count);
      EXPECT_TRUE(is_ok(engine_.submit(Op::kWrite, 0, part, &batches.emplace_back())));
      if (random_() % 3 == 0) {
        EXPECT_TRUE(is_ok(engine_.wait(batches.back())));
      }
      at += count;
    }
    return batches;
  }
  void save() {
    const State state = next_state();
    ASSERT_TRUE(is_ok(engine_.begin(state, 2)));
    for (uint64_t batch : write(state)) ASSERT_TRUE(is_ok(engine_.wait(batch)));
    if (random_() % 2 == 0) {
      EXPECT_TRUE(is_ok(engine_.run(Op::kCheck, 0, state)));
    }
    ASSERT_TRUE(is_ok(engine_.commit(state)));
    EXPECT_TRUE(holds(engine_.store(), engine_.latest(), state));
    states_.push_back(state);
  }
  void give_up() {
    const State state = next_state();
    ASSERT_TRUE(is_ok(engine_.begin(state, 2)));
    const std::vector<uint64_t> batches = write(state);
    ASSERT_TRUE(is_ok(engine_->drop(kDeadlineNs)));
    for (uint64_t batch : batches) {
      const Status status = engine_.wait(batch);
      EXPECT_TRUE(status.ok() || fails(status, Code::kInvalid, "given up"));
    }
    if (!states_.empty()) {
      EXPECT_TRUE(holds(engine_.store(), engine_.latest(), states_.back()));
    }
  }
  // To the version before the latest, if it is kept.
  void go_back() {
    const std::vector<Version> versions = engine_.store()->versions();
    if (states_.size() < 2 || versions.size() < 2) return;
    const State& before = states_[states_.size() - 2];
    if (versions[1].slot.step != before.step) return;
    ASSERT_TRUE(is_ok(engine_->rebase(versions[1].slot.version)));
    states_.pop_back();
    EXPECT_TRUE(holds(engine_.store(), engine_.latest(), states_.back()));
  }
  TestEngine& engine_;
  std::mt19937_64 random_;
  uint64_t step_ = 0;
  std::vector<State> states_;
};

// Reads the first version, whose bytes never change, in all the ways there are.
void read_on(TestEngine* engine, const State& first, uint64_t seed, std::atomic<bool>* stop) {
  std::mt19937_64 random(seed);
  while (!*stop) {
    State back = blank(first);
    const Op op = random() % 2 == 0 ? Op::kRead : Op::kCopy;
    EXPECT_TRUE(is_ok(engine->run(op, 1, back)));
    EXPECT_EQ(back.extents, first.extents);
    EXPECT_TRUE(is_ok(engine->run(Op::kVerify, 1, first)));
    EXPECT_TRUE(is_ok(engine->run(Op::kCheck, 1, back)));
  }
}

class EngineStress : public testing::TestWithParam<uint32_t> {};

TEST_P(EngineStress, random_lives_with_random_delays_lose_and_mix_nothing) {
  const uint64_t begin = first_seed();
  for (uint64_t seed = begin; seed < begin + 3; ++seed) {
    SCOPED_TRACE("LIGHTCKPT_STRESS_SEED=" + std::to_string(seed));
    Delays delays(seed);
    TestEngine engine(GetParam(), seed % 2 == 0 ? Granularity::kPage : Granularity::kVolatile);
    // Before anything is written: an early drain of that may still be running when it is committed.
    engine.media->set_trace(&delays);
    const State first = State::of(0, {30'000, 0, 7, 100'000});
    ASSERT_TRUE(is_ok(engine.save(first)));
    ASSERT_TRUE(is_ok(engine.store()->pin(1, true)));
    std::atomic<bool> stop = false;
    {
      std::vector<std::jthread> threads;
      for (uint64_t i = 0; i < 2; ++i) {
        threads.emplace_back([&, i] { read_on(&engine, first, seed + 100 + i, &stop); });
      }
      threads.emplace_back([&] {
        while (!stop) {
          EXPECT_GE(engine.store()->versions().size(), 1u);
          const uint64_t free_bytes = engine.store()->free_bytes();  // first: the media only grows
          EXPECT_LE(free_bytes, engine.media->size());
          EXPECT_GE(engine->counters().commits, 1u);
        }
      });
      Trainer(&engine, seed).live();
      stop = true;
    }
    EXPECT_TRUE(fails(engine.poll(1 << 20), Code::kNotFound, "never submitted"));
  }
}

INSTANTIATE_TEST_SUITE_P(Workers, EngineStress, testing::Values(1u, 4u));

}  // namespace
}  // namespace lightckpt
