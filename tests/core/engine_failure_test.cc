// An engine whose media fails. Goal: that a media is lost is kept and said by every later call; a
// version whose bytes may not be durable is never acknowledged, however the failure and the commit
// cross; and any other failure costs what met it, and goes away with its cause. Method: media on
// pages whose sync, check or growth fails when told to, and gates that make two threads meet where
// it matters.
#include <gtest/gtest.h>

#include "engine_helpers.h"

namespace lightckpt {
namespace {

const std::vector<uint64_t> kSizes = {5000, 0, 300, 70'000, 1};
const Status kGone(Code::kLost, "the disk is gone");

// On pages, with version 1; what was acknowledged must be there after a restart.
struct OnPages : testing::Test {
  OnPages() : engine(2, Granularity::kPage) { EXPECT_TRUE(is_ok(engine.save(first))); }

  void expect_final() {
    const State next = State::of(9, kSizes);
    EXPECT_TRUE(fails(engine.begin(next), Code::kLost, "the disk is gone"));
    EXPECT_TRUE(fails(engine.run(Op::kWrite, 0, next), Code::kLost, "the disk is gone"));
    uint64_t batch = 0;
    EXPECT_TRUE(fails(engine->queue_commit(next.host, &batch), Code::kLost, "the disk is gone"));
    EXPECT_EQ(engine.listed(), "1.0");
    const auto again = reopened(engine.store());
    EXPECT_TRUE(holds(again.get(), again->versions().back(), first));
  }

  const State first = State::of(1, kSizes);
  const State second = State::of(2, kSizes);
  TestEngine engine;
};

TEST_F(OnPages, a_batch_that_is_copied_is_on_its_way_to_the_disk) {
  Signal all_synced;
  std::atomic<uint64_t> bytes_synced = 0;
  ASSERT_TRUE(is_ok(engine.begin(second)));
  engine.media->on_sync = [&](uint64_t, uint64_t bytes) {
    if ((bytes_synced += bytes) >= 75'301) all_synced.set();
    return Status();
  };
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, second)));
  EXPECT_TRUE(all_synced.wait()) << "without a commit";
}

TEST_F(OnPages, a_drain_that_fails_in_the_background_is_final) {
  Signal failed;
  ASSERT_TRUE(is_ok(engine.begin(second)));
  engine.media->on_sync = [&](uint64_t, uint64_t) {
    failed.set();
    return kGone;
  };
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, second))) << "copied it is";
  ASSERT_TRUE(failed.wait());
  // Whether the engine knows already or finds out as it commits.
  EXPECT_TRUE(fails(engine.commit(second), Code::kLost, "the disk is gone"));
  expect_final();
  State back = blank(first);
  EXPECT_TRUE(is_ok(engine.run(Op::kRead, 1, back))) << "what is there can be read";
  EXPECT_EQ(back.extents, first.extents);
}

// What a drain could not bring to the disk is no later drain's: the commit would find nothing to
// do.
TEST_F(OnPages, a_commit_waits_for_a_drain_that_is_under_way) {
  EventLog log;
  Signal draining, queued;
  ASSERT_TRUE(is_ok(engine.begin(second)));
  engine.media->on_sync = [&](uint64_t, uint64_t) {
    draining.set();
    EXPECT_TRUE(queued.wait());
    return kGone;
  };
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, second)));
  ASSERT_TRUE(draining.wait());
  engine.media->set_trace(&log);  // the drain causes no event before it has failed
  uint64_t commit = 0, behind = 0;
  ASSERT_TRUE(is_ok(engine->queue_commit(second.host, &commit)));
  // The other worker takes them in their order.
  ASSERT_TRUE(is_ok(engine.submit(Op::kVerify, 1, spans_of(first), &behind)));
  ASSERT_TRUE(is_ok(engine.until_done(behind)));
  EXPECT_TRUE(fails(engine.poll(commit), Code::kTimeout));
  queued.set();
  EXPECT_TRUE(fails(engine.wait(commit), Code::kLost, "the disk is gone"));
  EXPECT_TRUE(log.take().empty()) << "not even its record was written";
  engine.media->set_trace(nullptr);
  expect_final();
}

TEST_F(OnPages, any_sync_of_a_commit_that_fails_is_final) {
  for (int index : {0, 1}) {
    TestEngine one(1, Granularity::kPage);
    const State state = State::of(1, {});  // nothing but a record, so no worker drains early
    std::atomic<int> syncs = 0;
    ASSERT_TRUE(is_ok(one.begin(state)));
    one.media->on_sync = [&](uint64_t, uint64_t) { return syncs++ == index ? kGone : Status(); };
    EXPECT_TRUE(fails(one.commit(state), Code::kLost, "the disk is gone")) << "sync " << index;
    EXPECT_TRUE(fails(one.begin(state), Code::kLost, "the disk is gone"));
    EXPECT_EQ(one.listed(), "");
    EXPECT_EQ(one->counters().commits, 0u);
  }
}

TEST_F(OnPages, a_begin_that_cannot_retire_is_final) {
  ASSERT_TRUE(is_ok(engine.save(second)));
  engine.media->on_sync = [](uint64_t, uint64_t) { return kGone; };
  EXPECT_TRUE(fails(engine.begin(State::of(3, kSizes)), Code::kLost, "the disk is gone"));
  engine.media->on_sync = nullptr;
  EXPECT_TRUE(fails(engine.begin(State::of(3, kSizes)), Code::kLost, "the disk is gone"));
}

TEST(LostPages, a_batch_that_met_some_fails_and_so_does_all_that_follows) {
  for (Op op : {Op::kWrite, Op::kRead, Op::kVerify, Op::kCopy}) {
    TestEngine engine;
    const State first = State::of(1, kSizes), second = State::of(2, kSizes);
    ASSERT_TRUE(is_ok(engine.save(first)));
    ASSERT_TRUE(is_ok(engine.begin(second)));
    engine.media->on_check = [] { return Status(Code::kLost, "the file was cut"); };
    State back = blank(first);
    EXPECT_TRUE(fails(engine.run(op, op == Op::kWrite ? 0 : 1, back), Code::kLost, "the file was"));
    EXPECT_TRUE(fails(engine.run(Op::kWrite, 0, second), Code::kLost, "the file was cut"));
    EXPECT_TRUE(fails(engine.commit(second), Code::kLost, "the file was cut"));
    EXPECT_TRUE(fails(engine.begin(second), Code::kLost, "the file was cut"));
  }
}

TEST(LostPages, a_check_of_memory_has_nothing_to_do_with_them) {
  TestEngine engine;
  const State state = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, state)));
  engine.media->on_check = [] { return Status(Code::kLost, "the file was cut"); };
  EXPECT_TRUE(is_ok(engine.run(Op::kCheck, 0, state)));
}

// Each as "this call failed; a later one may succeed".
struct OneFailure : testing::Test {
  OneFailure() { EXPECT_TRUE(is_ok(engine.save(first))); }
  void fail_next_check() {
    engine.media->on_check = [this] {
      return checks++ == 0 ? Status(Code::kIo, "a read failed") : Status();
    };
  }
  void expect_as_new() {
    const State next = State::of(3, kSizes);
    ASSERT_TRUE(is_ok(engine.save(next)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), next));
  }

  const State first = State::of(1, kSizes), second = State::of(2, kSizes);
  std::atomic<int> checks = 0;
  TestEngine engine;
};

TEST_F(OneFailure, of_a_write_costs_the_version_in_flight) {
  ASSERT_TRUE(is_ok(engine.begin(second)));
  fail_next_check();
  EXPECT_TRUE(fails(engine.run(Op::kWrite, 0, second), Code::kIo, "a read failed"));
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, second))) << "what was met is not forgotten for it";
  EXPECT_TRUE(fails(engine.commit(second), Code::kIo, "a read failed"));
  EXPECT_EQ(engine.listed(), "1.0");
  EXPECT_EQ(engine->counters().drops, 1u);
  expect_as_new();
}

TEST_F(OneFailure, of_a_read_costs_that) {
  ASSERT_TRUE(is_ok(engine.begin(second)));
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, second)));
  fail_next_check();
  EXPECT_TRUE(fails(engine.run(Op::kVerify, 1, first), Code::kIo, "a read failed"));
  ASSERT_TRUE(is_ok(engine.commit(second)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), second));
  expect_as_new();
}

TEST_F(OneFailure, of_a_begin_costs_no_other) {
  engine.media->on_grow = [](uint64_t) { return Status(Code::kIo, "no answer"); };
  const State large = State::of(2, {2 << 20});
  EXPECT_TRUE(fails(engine.begin(large), Code::kIo, "no answer"));
  uint64_t batch = 0;
  EXPECT_TRUE(fails(engine->queue_commit({}, &batch), Code::kInvalid, "no version is in flight"));
  engine.media->on_grow = nullptr;
  ASSERT_TRUE(is_ok(engine.save(large)));
  expect_as_new();
}

TEST(NotTheMedia, too_little_room_ends_when_less_is_asked_for) {
  TestEngine engine(1, Granularity::kVolatile, 512 * 1024);
  ASSERT_TRUE(is_ok(engine.save(State::of(1, kSizes))));
  EXPECT_TRUE(fails(engine.begin(State::of(2, {600'000})), Code::kNoSpace));
  EXPECT_EQ(engine.listed(), "1.0");
  ASSERT_TRUE(is_ok(engine.save(State::of(3, kSizes))));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), State::of(3, kSizes)));
}

// A worker's own drain, before the commit's, takes the ranges and fails; no later one says so.
TEST_F(OnPages, a_file_system_that_was_full_costs_the_version_of_that_time_only) {
  Signal failed;
  ASSERT_TRUE(is_ok(engine.begin(second)));
  engine.media->on_sync = [&](uint64_t, uint64_t) {
    failed.set();
    return Status(Code::kNoSpace, "the disk is full");
  };
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, second))) << "copied it is";
  ASSERT_TRUE(failed.wait());
  EXPECT_TRUE(fails(engine.commit(second), Code::kNoSpace, "the disk is full"));
  EXPECT_TRUE(fails(engine.begin(second), Code::kNoSpace, "the disk is full"));
  engine.media->on_sync = nullptr;
  const State third = State::of(3, kSizes);
  ASSERT_TRUE(is_ok(engine.save(third)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), third));
  EXPECT_EQ(engine->counters().commits, 2u);
}

TEST(NotTheMedia, an_outgrown_record_costs_its_version_only) {
  TestEngine engine;
  ASSERT_TRUE(is_ok(engine.save(State::of(1, kSizes))));
  const State small = State::of(2, kSizes), large = State::of(2, kSizes, 100'000);
  ASSERT_TRUE(is_ok(engine.begin(small)));
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, small)));
  EXPECT_TRUE(fails(engine.commit(large), Code::kInvalid, "was laid out for"));
  EXPECT_EQ(engine->counters().drops, 1u);
  EXPECT_EQ(engine.listed(), "1.0");
  ASSERT_TRUE(is_ok(engine.save(large)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), large));
}

TEST(NotTheMedia, a_bad_chunk_of_one_version_hinders_no_other) {
  TestEngine engine;
  const State first = State::of(1, kSizes), second = State::of(2, kSizes);
  ASSERT_TRUE(is_ok(engine.save(first)));
  engine.flip(0, 0);
  EXPECT_TRUE(fails(engine.run(Op::kVerify, 1, first), Code::kChanged));
  ASSERT_TRUE(is_ok(engine.save(second)));
  EXPECT_TRUE(is_ok(engine.run(Op::kVerify, 2, second)));
}

}  // namespace
}  // namespace lightckpt
