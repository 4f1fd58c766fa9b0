// The engine's batches. Goal: bytes arrive whole whichever way they are cut and whoever copies
// them; what does not match its checksum is reported with its extent; and a report says what has
// happened. Method: states of many shapes go through heap media; bytes are changed behind the
// engine's back; a gate holds a worker where a test must see a batch that is not done.
#include "engine.h"

#include <gtest/gtest.h>

#include <set>

#include "engine_helpers.h"

namespace lightckpt {
namespace {

const std::vector<uint64_t> kSizes = {5000, 0, 300, 70'000, 1};
constexpr uint64_t kChunks = 4;  // of kSizes: all but the empty extent

TEST(Engine, what_is_written_and_committed_is_read_back) {
  const std::vector<std::vector<uint64_t>> shapes = {
      kSizes, {}, {0}, {kChunkBytes}, {kChunkBytes + 1, 64}, {3 * kChunkBytes + 17, 1, 2000}};
  for (uint32_t workers : {1u, 2u, 5u}) {
    for (const auto& sizes : shapes) {
      TestEngine engine(workers);
      const State state = State::of(1, sizes);
      ASSERT_TRUE(is_ok(engine.save(state)));
      EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
      for (Op op : {Op::kRead, Op::kCopy}) {
        State back = blank(state);
        ASSERT_TRUE(is_ok(engine.run(op, 1, back)));
        EXPECT_EQ(back.extents, state.extents);
      }
      EXPECT_TRUE(is_ok(engine.run(Op::kVerify, 1, state)));
    }
  }
}

TEST(Engine, spans_may_come_in_any_order_and_in_many_batches) {
  TestEngine engine;
  const State state = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  std::vector<Span> spans = spans_of(state);
  std::ranges::reverse(spans);
  std::vector<uint64_t> batches;
  for (const Span& span : spans) {
    ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {span}, &batches.emplace_back())));
  }
  for (uint64_t batch : batches) ASSERT_TRUE(is_ok(engine.wait(batch)));
  ASSERT_TRUE(is_ok(engine.commit(state)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

TEST(Engine, ten_thousand_small_extents_go_through_one_batch) {
  std::vector<uint64_t> sizes(10'000);
  std::mt19937_64 random(1);
  for (uint64_t& bytes : sizes) bytes = random() % 500;
  TestEngine engine(3, Granularity::kVolatile, 32 << 20);
  const State state = State::of(1, sizes);
  ASSERT_TRUE(is_ok(engine.save(state)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  State back = blank(state);
  ASSERT_TRUE(is_ok(engine.run(Op::kRead, 1, back)));
  EXPECT_EQ(back.extents, state.extents);
}

TEST(Engine, each_chunk_of_an_extent_has_its_checksum) {
  constexpr uint64_t kBytes = 2 * kChunkBytes + 17;
  for (uint64_t at : {uint64_t{0}, kChunkBytes - 1, kChunkBytes, 2 * kChunkBytes, kBytes - 1}) {
    TestEngine engine;
    const State state = State::of(1, {100, kBytes});
    ASSERT_TRUE(is_ok(engine.save(state)));
    engine.flip(1, at);
    for (Op op : {Op::kVerify, Op::kRead}) {
      State back = blank(state);
      Report report;
      EXPECT_TRUE(fails(engine.run(op, 1, back, &report), Code::kChanged, "in extent 1"));
      EXPECT_EQ(report.bad_count, 1u) << "a byte of chunk " << at / kChunkBytes;
      EXPECT_EQ(report.bad[0], 1u);
      EXPECT_EQ(report.bytes, kBytes + 100) << "all was looked at";
    }
    State back = blank(state);
    EXPECT_TRUE(is_ok(engine.run(Op::kCopy, 1, back))) << "a copy does not compare";
    EXPECT_NE(back.extents, state.extents);
  }
}

TEST(Engine, a_check_finds_memory_that_changed_since_it_was_written) {
  TestEngine engine;
  State state = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, state)));
  ASSERT_TRUE(is_ok(engine.run(Op::kCheck, 0, state)));
  state.extents[3][69'999] ^= std::byte{1};
  Report report;
  EXPECT_TRUE(fails(engine.run(Op::kCheck, 0, state, &report), Code::kChanged, "in extent 3"));
  EXPECT_EQ(report.bad_count, 1u);
  state.extents[3][69'999] ^= std::byte{1};
  ASSERT_TRUE(is_ok(engine.commit(state)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state)) << "a check writes nothing";
  EXPECT_TRUE(is_ok(engine.run(Op::kCheck, 1, state))) << "against a committed version too";
}

TEST(Engine, more_bad_chunks_than_a_report_holds_are_counted) {
  constexpr uint32_t kBad = 40;
  TestEngine engine;
  const State state = State::of(1, std::vector<uint64_t>(100, 50));
  ASSERT_TRUE(is_ok(engine.save(state)));
  for (uint32_t extent = 0; extent < kBad; ++extent) engine.flip(2 * extent, 7);
  Report report;
  EXPECT_TRUE(fails(engine.run(Op::kVerify, 1, state, &report), Code::kChanged, "40 chunks"));
  EXPECT_EQ(report.bad_count, kBad);
  const std::set<uint32_t> named(report.bad.begin(), report.bad.end());
  EXPECT_EQ(named.size(), report.bad.size());
  for (uint32_t extent : named) EXPECT_TRUE(extent % 2 == 0 && extent < 2 * kBad) << extent;
}

TEST(Engine, a_batch_without_bytes_is_done_at_once) {
  TestEngine engine(1);
  const State state = State::of(1, {0, 0});
  Gate gate(at_copy);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  engine.media->set_trace(&gate);
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, spans_of(state), &batch)));
  EXPECT_TRUE(is_ok(engine.poll(batch)));
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {}, &batch)));
  EXPECT_TRUE(is_ok(engine.poll(batch)));
  gate.open();
  EXPECT_TRUE(is_ok(engine.commit(state)));
}

TEST(Engine, a_wait_ends_when_its_time_is_over_and_says_how_far_the_batch_is) {
  TestEngine engine(1);
  const State state = State::of(1, kSizes);
  Gate gate([](const MediaEvent& e) { return at_copy(e) && e.bytes == 70'000; });
  ASSERT_TRUE(is_ok(engine.begin(state)));
  engine.media->set_trace(&gate);
  const std::vector<Span> spans = spans_of(state);
  uint64_t front = 0, batch = 0;
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans[0], spans[2]}, &front)));
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans[3], spans[4]}, &batch)));
  ASSERT_TRUE(gate.wait_held());
  EXPECT_TRUE(is_ok(engine.wait(front))) << "one that stands before it is not held up";
  Report report;
  for (int64_t timeout_ns : {0, 1000}) {
    EXPECT_TRUE(fails(engine->wait(batch, timeout_ns, &report), Code::kTimeout, "0 bytes were"));
    EXPECT_GT(report.start_ns, 0u);
    EXPECT_EQ(report.end_ns, 0u);
  }
  gate.open();
  ASSERT_TRUE(is_ok(engine.wait(batch, &report)));
  EXPECT_EQ(report.bytes, 70'001u);
}

TEST(Engine, the_longest_timeout_is_a_wait_like_any) {
  TestEngine engine(1);
  const State state = State::of(1, kSizes);
  Gate gate(at_copy);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  engine.media->set_trace(&gate);
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, spans_of(state), &batch)));
  ASSERT_TRUE(gate.wait_held());
  std::thread opener([&] { gate.open(); });
  Report report;
  EXPECT_TRUE(is_ok(engine->wait(batch, INT64_MAX, &report)));
  opener.join();
}

TEST(Engine, a_report_has_its_times_in_order) {
  TestEngine engine;
  const State state = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  Report report;
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, state, &report)));
  EXPECT_EQ(report.bytes, 75'301u);
  EXPECT_EQ(report.bad_count, 0u);
  EXPECT_GT(report.submit_ns, 0u);
  EXPECT_LE(report.submit_ns, report.start_ns);
  EXPECT_LE(report.start_ns, report.end_ns);
}

TEST(Engine, batches_that_are_not_known_are_not_found) {
  TestEngine engine;
  Report report;
  EXPECT_TRUE(fails(engine->wait(0, 0, &report), Code::kNotFound, "never submitted"));
  EXPECT_TRUE(fails(engine->wait(1, kDeadlineNs, &report), Code::kNotFound, "never submitted"));
  ASSERT_TRUE(is_ok(engine.save(State::of(1, kSizes))));
  uint64_t batch = 0;
  for (size_t i = 0; i <= Engine::kReports; ++i) {
    ASSERT_TRUE(is_ok(engine.submit(Op::kVerify, 1, {}, &batch)));
    ASSERT_TRUE(is_ok(engine.poll(batch)));
  }
  EXPECT_TRUE(fails(engine->wait(1, kDeadlineNs, &report), Code::kNotFound, "long ago"));
  EXPECT_TRUE(is_ok(engine.poll(batch)));
}

TEST(Engine, the_queue_is_bounded_and_a_slow_batch_keeps_its_report) {
  TestEngine engine(1);
  ASSERT_TRUE(is_ok(engine.save(State::of(1, kSizes))));
  const State state = State::of(2, kSizes);
  Gate gate(at_copy);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  engine.media->set_trace(&gate);
  uint64_t slow = 0, batch = 0;
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, spans_of(state), &slow)));
  ASSERT_TRUE(gate.wait_held());
  const std::vector<Span> tiny = {spans_of(state)[4]};
  for (size_t i = 1; i < Engine::kBatchesMax; ++i) {
    // Some are done at once, and so overtake the slow one.
    const auto spans = i % 2 == 0 ? tiny : std::vector<Span>();
    ASSERT_TRUE(is_ok(engine.submit(Op::kVerify, 1, spans, &batch)));
  }
  uint64_t refused = 0;
  EXPECT_TRUE(fails(engine.submit(Op::kVerify, 1, {}, &refused), Code::kInvalid, "8192"));
  gate.open();
  EXPECT_TRUE(is_ok(engine.wait(slow)));
  EXPECT_TRUE(is_ok(engine.wait(batch)));
  EXPECT_TRUE(is_ok(engine.submit(Op::kVerify, 1, {}, &batch)));
  EXPECT_TRUE(is_ok(engine.commit(state)));
}

TEST(Engine, what_makes_no_sense_is_refused_in_words) {
  TestEngine engine;
  const State state = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(engine.save(state)));
  const std::vector<Span> spans = spans_of(state);
  uint64_t batch = 0;
  const auto submit = [&](Op op, uint64_t version, const std::vector<Span>& asked) {
    return engine.submit(op, version, asked, &batch);
  };
  EXPECT_TRUE(fails(submit(Op::kWrite, 1, spans), Code::kInvalid, "read it only"));
  EXPECT_TRUE(fails(submit(Op::kCommit, 1, spans), Code::kInvalid, "read it only"));
  EXPECT_TRUE(fails(submit(Op::kWrite, 0, spans), Code::kInvalid, "no version is in flight"));
  for (Op op : {Op::kRead, Op::kVerify, Op::kCopy, Op::kCommit}) {
    EXPECT_TRUE(fails(submit(op, 0, spans), Code::kInvalid, "written and checked only"));
  }
  EXPECT_TRUE(fails(submit(Op::kRead, 2, spans), Code::kNotFound, "no version 2"));
  EXPECT_TRUE(fails(submit(Op::kRead, 1, {{spans[0].memory, 5, 0}}), Code::kInvalid, "5 of 5"));
  EXPECT_TRUE(fails(submit(Op::kRead, 1, {{nullptr, 0, 0}}), Code::kInvalid, "no memory"));
  EXPECT_TRUE(is_ok(submit(Op::kVerify, 1, {{nullptr, 0, 0}}))) << "a verify needs none";
  EXPECT_TRUE(is_ok(engine.wait(batch)));
}

TEST(Engine, a_bad_record_is_found_before_anything_is_read) {
  TestEngine engine;
  const State state = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(engine.save(state)));
  engine.media->memory()[engine.latest().slot.record_offset + 40] ^= std::byte{1};
  State back = blank(state);
  EXPECT_TRUE(fails(engine.run(Op::kRead, 1, back), Code::kFormat, "checksum of its record"));
  EXPECT_EQ(back.extents, blank(state).extents);
}

TEST(Engine, a_workers_copies_are_fenced_by_it_before_the_batch_is_done) {
  TestEngine engine(3);
  const State state = State::of(1, {3 * kChunkBytes, 5000, 300});
  EventLog log;
  ASSERT_TRUE(is_ok(engine.begin(state)));
  engine.media->set_trace(&log);
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, state)));
  std::set<std::thread::id> unfenced, copying;
  uint64_t copied = 0;
  for (const auto& event : log.take()) {
    if (event.kind == EventKind::kFence) unfenced.erase(event.thread);
    if (event.kind != EventKind::kNtCopy && event.kind != EventKind::kFlush) continue;
    unfenced.insert(event.thread);
    if (event.kind == EventKind::kNtCopy) copied += event.bytes;
  }
  EXPECT_TRUE(unfenced.empty());
  EXPECT_EQ(copied, 3 * kChunkBytes + 5300);
  ASSERT_TRUE(is_ok(engine.commit(state)));
}

}  // namespace
}  // namespace lightckpt
