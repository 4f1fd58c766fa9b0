// An attempt's life in the engine. Goal: begin, writes, commit or drop happen in this order or are
// refused; what was given up, at whatever moment, leaves no version and no thread in its area; and
// closing loses nothing that was acknowledged. Method: a gate holds a worker in the middle of a
// copy while the test does what it should not, or closes.
#include <gtest/gtest.h>

#include "engine_helpers.h"

namespace lightckpt {
namespace {

const std::vector<uint64_t> kSizes = {5000, 0, 300, 70'000, 1};
constexpr uint64_t kChunks = 4;

// An engine with version 1, an attempt at a second, and a worker held in its first copy.
struct Held : testing::Test {
  explicit Held(uint32_t workers = 1) : engine(workers) {
    EXPECT_TRUE(is_ok(engine.save(State::of(1, kSizes))));
    EXPECT_TRUE(is_ok(engine.begin(state)));
    engine.media->set_trace(&gate);
  }
  void hold_all() {
    for (const Span& span : spans_of(state)) {
      uint64_t batch = 0;
      ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {span}, &batch)));
      batches.push_back(batch);
    }
    ASSERT_TRUE(gate.wait_held());
  }

  const State state = State::of(2, kSizes);
  Gate gate{at_copy};
  TestEngine engine;
  std::vector<uint64_t> batches;
};

TEST(Attempt, only_one_is_in_flight) {
  TestEngine engine;
  const State state = State::of(7, kSizes);
  uint64_t batch = 0;
  EXPECT_TRUE(fails(engine->queue_commit({}, &batch), Code::kInvalid, "no version is in flight"));
  EXPECT_TRUE(fails(engine->drop(0), Code::kInvalid, "no version is in flight"));
  ASSERT_TRUE(is_ok(engine.begin(state)));
  EXPECT_TRUE(fails(engine.begin(state), Code::kInvalid, "of step 7 is in flight"));
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, state)));
  ASSERT_TRUE(is_ok(engine.commit(state)));
  EXPECT_TRUE(fails(engine->queue_commit({}, &batch), Code::kInvalid, "no version is in flight"));
  EXPECT_TRUE(fails(engine.run(Op::kWrite, 0, state), Code::kInvalid, "no version is in flight"));
  EXPECT_TRUE(is_ok(engine.begin(state)));
}

TEST(Attempt, it_is_committed_only_when_every_chunk_was_written) {
  TestEngine engine;
  const State state = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  uint64_t batch = 0;
  uint64_t written = 0;
  for (const Span& span : spans_of(state)) {
    if (written < kChunks) {
      EXPECT_TRUE(fails(engine->queue_commit(state.host, &batch), Code::kInvalid,
                        std::to_string(written) + " of 4 chunks"));
    }
    ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {span}, &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch)));
    written += state.extents[span.extent].empty() ? 0 : 1;
  }
  ASSERT_TRUE(is_ok(engine.commit(state)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

TEST(Attempt, an_extent_written_twice_does_not_stand_in_for_another) {
  TestEngine engine;
  const State state = State::of(1, {1000, 1000});
  const std::vector<Span> spans = spans_of(state);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  uint64_t batch = 0;
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans[0]}, &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch)));
  }
  EXPECT_TRUE(fails(engine->queue_commit(state.host, &batch), Code::kInvalid, "chunks"));
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans[1]}, &batch)));
  ASSERT_TRUE(is_ok(engine.wait(batch)));
  ASSERT_TRUE(is_ok(engine.commit(state))) << "now all are there";
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

TEST(Attempt, one_without_extents_is_its_host_state) {
  TestEngine engine;
  for (uint64_t step = 1; step <= 3; ++step) {
    const State state = State::of(step, {});
    ASSERT_TRUE(is_ok(engine.begin(state)));
    ASSERT_TRUE(is_ok(engine.commit(state)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  }
}

TEST_F(Held, nothing_is_committed_while_a_chunk_is_being_written) {
  hold_all();
  uint64_t batch = 0;
  EXPECT_TRUE(fails(engine->queue_commit(state.host, &batch), Code::kInvalid, "0 of 4 chunks"));
  gate.open();
  for (uint64_t written : batches) ASSERT_TRUE(is_ok(engine.wait(written)));
  ASSERT_TRUE(is_ok(engine.commit(state)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

TEST_F(Held, nothing_is_written_or_committed_again_behind_a_queued_commit) {
  const State empty = State::of(9, {});
  gate.open();
  ASSERT_TRUE(is_ok(engine->drop(kDeadlineNs)));
  Gate at_record(at_copy);
  ASSERT_TRUE(is_ok(engine.begin(empty)));
  engine.media->set_trace(&at_record);
  uint64_t commit = 0, batch = 0;
  ASSERT_TRUE(is_ok(engine->queue_commit(empty.host, &commit)));
  ASSERT_TRUE(at_record.wait_held());
  EXPECT_TRUE(fails(engine->queue_commit(empty.host, &batch), Code::kInvalid, "queued already"));
  EXPECT_TRUE(fails(engine.submit(Op::kWrite, 0, {}, &batch), Code::kInvalid, "no more writes"));
  EXPECT_TRUE(fails(engine.begin(State::of(10, {})), Code::kInvalid, "step 9 is in flight"));
  EXPECT_TRUE(fails(engine->rebase(1), Code::kInvalid, "step 9 is in flight"));
  at_record.open();
  ASSERT_TRUE(is_ok(engine.wait(commit)));
  EXPECT_EQ(engine.listed(), "2.0 1.0");
  EXPECT_EQ(engine->counters().commits, 2u);
  engine.media->set_trace(nullptr);
}

TEST_F(Held, a_drop_cancels_what_is_queued_and_waits_for_what_is_being_copied) {
  hold_all();
  EXPECT_TRUE(fails(engine->drop(0), Code::kTimeout, "have not left"));
  // The one being copied is still out; those that no worker had taken are done with.
  EXPECT_TRUE(fails(engine.poll(batches[0]), Code::kTimeout));
  for (size_t i = 2; i < batches.size(); ++i) {
    EXPECT_TRUE(fails(engine.poll(batches[i]), Code::kInvalid, "given up"));
  }
  uint64_t batch = 0;
  EXPECT_TRUE(fails(engine.begin(state), Code::kInvalid, "in flight")) << "a worker is in its area";
  EXPECT_TRUE(fails(engine->queue_commit(state.host, &batch), Code::kInvalid, "no version"));
  EXPECT_TRUE(fails(engine.submit(Op::kWrite, 0, {}, &batch), Code::kInvalid, "no version"));
  gate.open();
  EXPECT_TRUE(fails(engine.wait(batches[0]), Code::kInvalid, "given up"));
  ASSERT_TRUE(is_ok(engine.begin(state))) << "the next begin looks again";
  EXPECT_EQ(engine->counters().drops, 1u);
  EXPECT_EQ(engine.listed(), "1.0");
  EXPECT_TRUE(holds(engine.store(), engine.latest(), State::of(1, kSizes)));
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, state)));
  ASSERT_TRUE(is_ok(engine.commit(state)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

TEST_F(Held, a_drop_that_is_given_time_ends_when_the_worker_has_left) {
  hold_all();
  Status status;
  std::thread dropping([&] { status = engine->drop(kDeadlineNs); });
  // The drop has begun when it has cancelled a batch. Who waits for that would copy it, and be
  // held.
  EXPECT_TRUE(fails(engine.until_done(batches.back()), Code::kInvalid, "given up"));
  gate.open();
  dropping.join();
  EXPECT_TRUE(is_ok(status));
  EXPECT_EQ(engine->counters().drops, 1u);
  ASSERT_TRUE(is_ok(engine.begin(state)));
}

TEST_F(Held, a_drop_leaves_reads_of_other_versions_alone) {
  hold_all();
  State back = blank(state);
  uint64_t reading = 0;
  ASSERT_TRUE(is_ok(engine.submit(Op::kRead, 1, spans_of(back), &reading)));
  EXPECT_TRUE(fails(engine->drop(0), Code::kTimeout));
  gate.open();
  ASSERT_TRUE(is_ok(engine.wait(reading)));
  EXPECT_EQ(back.extents, State::of(1, kSizes).extents);
}

// A worker is held in a drain, which is of no batch.
TEST(Attempt, a_drop_waits_for_no_check_of_another_version) {
  TestEngine engine(1, Granularity::kPage);
  const State first = State::of(1, kSizes), second = State::of(2, kSizes);
  Signal draining, dropped;
  ASSERT_TRUE(is_ok(engine.save(first)));
  ASSERT_TRUE(is_ok(engine.begin(second)));
  engine.media->on_sync = [&](uint64_t, uint64_t) {
    draining.set();
    EXPECT_TRUE(dropped.wait());
    return Status();
  };
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, second)));
  ASSERT_TRUE(draining.wait());
  uint64_t check = 0;
  ASSERT_TRUE(is_ok(engine.submit(Op::kCheck, 1, spans_of(first), &check)));
  EXPECT_TRUE(is_ok(engine->drop(0)));
  dropped.set();
  EXPECT_TRUE(is_ok(engine.wait(check)));
  ASSERT_TRUE(is_ok(engine.save(second)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), second));
}

// Its checksum must be that of what is there at last.
TEST(Attempt, nothing_is_committed_while_a_chunk_is_written_again) {
  TestEngine engine(2);
  const State first = State::of(1, kSizes);
  State second = State::of(2, kSizes);
  ASSERT_TRUE(is_ok(engine.save(first)));
  ASSERT_TRUE(is_ok(engine.begin(second)));
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, second)));
  std::atomic<int> copies = 0;
  Gate gate([&](const MediaEvent& event) { return at_copy(event) && copies++ == 0; });
  engine.media->set_trace(&gate);
  second.extents[0][7] ^= std::byte{1};
  uint64_t again = 0, commit = 0, behind = 0;
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans_of(second)[0]}, &again)));
  ASSERT_TRUE(gate.wait_held());
  ASSERT_TRUE(is_ok(engine->queue_commit(second.host, &commit)));
  // The other worker takes them in their order.
  ASSERT_TRUE(is_ok(engine.submit(Op::kVerify, 1, spans_of(first), &behind)));
  ASSERT_TRUE(is_ok(engine.until_done(behind)));
  EXPECT_TRUE(fails(engine.poll(commit), Code::kTimeout));
  gate.open();
  ASSERT_TRUE(is_ok(engine.wait(commit)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), second));
  engine.media->set_trace(nullptr);
}

TEST(Attempt, many_that_are_dropped_cost_no_space) {
  TestEngine engine;
  ASSERT_TRUE(is_ok(engine.save(State::of(1, kSizes))));
  const auto used = [&] { return engine.media->size() - engine.store()->free_bytes(); };
  const uint64_t used_before = used();
  for (uint64_t step = 2; step < 50; ++step) {
    const State state = State::of(step, {step * 1000, 300});
    ASSERT_TRUE(is_ok(engine.begin(state)));
    ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, state)));
    ASSERT_TRUE(is_ok(engine->drop(kDeadlineNs)));
  }
  EXPECT_EQ(used(), used_before);
  EXPECT_EQ(engine->counters().drops, 48u);
  EXPECT_EQ(engine.listed(), "1.0");
  EXPECT_TRUE(holds(engine.store(), engine.latest(), State::of(1, kSizes)));
}

// A check may outlast the commit behind it; its checksums must not be those of the next attempt.
TEST(Attempt, the_next_one_takes_no_checksums_from_a_check_that_is_not_done) {
  TestEngine engine(2);
  for (uint64_t step = 1; step <= 40; ++step) {
    const State state = State::of(step, {kChunkBytes, kChunkBytes});
    ASSERT_TRUE(is_ok(engine.begin(state)));
    ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, state)));
    uint64_t check = 0;
    ASSERT_TRUE(is_ok(engine.submit(Op::kCheck, 0, spans_of(state), &check)));
    ASSERT_TRUE(is_ok(engine.commit(state)));
    Status next = engine.begin(state);
    EXPECT_TRUE(next.ok() || fails(next, Code::kInvalid, "a check"));
    EXPECT_TRUE(is_ok(engine.wait(check)));
    if (!next.ok()) next = engine.begin(state);
    ASSERT_TRUE(is_ok(next));
    ASSERT_TRUE(is_ok(engine->drop(kDeadlineNs)));
  }
}

// On a file, so that what closing leaves can be looked at.
struct Closing : testing::Test {
  Closing() : path(folder.file("store")) {}
  std::unique_ptr<Store> opened() {
    StoreOptions options;
    options.create = true;
    std::unique_ptr<Store> store;
    EXPECT_TRUE(is_ok(Store::open(path, options, &store)));
    return store;
  }

  TempFolder folder{memory_folder()};
  std::string path;
};

TEST_F(Closing, a_queued_commit_is_made_and_an_unfinished_attempt_is_not) {
  const State first = State::of(1, kSizes), second = State::of(2, kSizes);
  Gate gate(at_copy);
  {
    Engine engine(opened(), 1);
    uint64_t batch = 0;
    Report report;
    ASSERT_TRUE(is_ok(engine.begin(1, 1, first.sizes(), first.blob, first.host.size())));
    ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, spans_of(first), &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch, kDeadlineNs, &report)));
    engine.store().media().set_trace(&gate);
    ASSERT_TRUE(is_ok(engine.queue_commit(first.host, &batch)));
    ASSERT_TRUE(gate.wait_held());
    gate.open();
  }
  {
    Engine engine(opened(), 2);
    EXPECT_EQ(list_of(engine.store().versions()), "1.0");
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(engine.begin(2, 1, second.sizes(), second.blob, second.host.size())));
    for (const Span& span : spans_of(second)) {
      ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, std::span(&span, 1), &batch)));
    }
  }
  const auto store = opened();
  ASSERT_EQ(list_of(store->versions()), "1.0");
  EXPECT_TRUE(holds(store.get(), store->versions().front(), first));
}

TEST_F(Closing, many_unfinished_batches_end_with_it) {
  const State state = State::of(1, std::vector<uint64_t>(200, 50'000));
  for (int round = 0; round < 5; ++round) {
    Engine engine(opened(), 2);
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(engine.begin(1, 1, state.sizes(), state.blob, state.host.size())));
    for (const Span& span : spans_of(state)) {
      ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, std::span(&span, 1), &batch)));
    }
  }
  EXPECT_TRUE(opened()->versions().empty());
}

}  // namespace
}  // namespace lightckpt
