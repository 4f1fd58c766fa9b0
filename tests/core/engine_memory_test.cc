// An engine whose workers find no memory. Goal: from begin on they ask for none, but for what a
// plain file has to remember; where they do, the version in flight is refused in words, or made;
// the process goes on, and so do the versions after it. Method: operator new fails on every thread
// but the test's own, always or at the nth time.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "engine_helpers.h"

namespace {

constexpr uint64_t kNone = 0, kEach = UINT64_MAX;

thread_local bool own_thread = false;
std::atomic<uint64_t> refuse = kNone;  // kEach, or the nth that is asked for
std::atomic<uint64_t> asked = 0;       // since then, on other threads

void* allocated(size_t bytes) {
  if (!own_thread && refuse != kNone) {
    const uint64_t nth = ++asked;
    if (refuse == kEach || refuse == nth) throw std::bad_alloc();
  }
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Not inlined: a compiler that sees the half of a pair warns of the other.
[[gnu::noinline]] void* operator new(size_t bytes) { return allocated(bytes); }
[[gnu::noinline]] void* operator new[](size_t bytes) { return allocated(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace lightckpt {
namespace {

const std::vector<uint64_t> kSizes = {5000, 0, 300, 2 * kChunkBytes + 70'000, 1};

struct Memory : testing::Test {
  Memory() { own_thread = true; }
  ~Memory() override { refuse = kNone; }

  // What workers alone do, while they find no memory, or not at the nth time.
  static Status save(TestEngine* engine, const State& state, uint64_t refused) {
    RETURN_IF_ERROR(engine->begin(state));
    asked = 0;
    refuse = refused;
    uint64_t batch = 0;
    Status status = engine->submit(Op::kWrite, 0, spans_of(state), &batch);
    if (status.ok()) status = engine->until_done(batch);
    uint64_t commit = 0;
    if (status.ok()) status = (*engine)->queue_commit(state.host, &commit);
    if (status.ok() && commit != 0) status = engine->until_done(commit);
    if (commit == 0) {
      EXPECT_TRUE(is_ok((*engine)->drop(kDeadlineNs)));
    }
    refuse = kNone;
    return status;
  }
  static void expect_as_new(TestEngine* engine, uint64_t step) {
    const State state = State::of(step, kSizes);
    ASSERT_TRUE(is_ok(engine->save(state)));
    EXPECT_TRUE(holds(engine->store(), engine->latest(), state));
    const auto again = reopened(engine->store());
    EXPECT_TRUE(holds(again.get(), again->versions().front(), state)) << "after a restart";
  }
};

TEST_F(Memory, from_begin_on_workers_ask_for_none) {
  for (const Granularity granularity : {Granularity::kVolatile, Granularity::kCacheLine}) {
    TestEngine engine(2, granularity);
    for (uint64_t step = 1; step <= 3; ++step) {
      const State state = State::of(step, kSizes);
      EXPECT_TRUE(is_ok(save(&engine, state, kEach)));
      EXPECT_EQ(asked, 0u);
      EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
      uint64_t batch = 0;
      State back = blank(state);
      refuse = kEach;
      ASSERT_TRUE(is_ok(engine.submit(Op::kRead, step, spans_of(back), &batch)));
      EXPECT_TRUE(is_ok(engine.until_done(batch)));
      refuse = kNone;
      EXPECT_EQ(back.extents, state.extents);
    }
  }
}

TEST_F(Memory, what_a_file_has_to_remember_costs_the_version_where_there_is_none) {
  TestEngine engine(2, Granularity::kPage);
  expect_as_new(&engine, 1);
  EXPECT_TRUE(fails(save(&engine, State::of(2, kSizes), kEach), Code::kNoSpace, "no host memory"));
  EXPECT_GT(asked, 0u);
  EXPECT_EQ(engine.listed(), "1.0");
  expect_as_new(&engine, 3);
}

TEST_F(Memory, none_at_any_one_moment_costs_one_version_at_most) {
  uint64_t refused = 0;
  for (uint64_t nth = 1; nth == 1 || asked >= nth - 1; ++nth) {
    TestEngine engine(1, Granularity::kPage);
    expect_as_new(&engine, 1);
    const Status status = save(&engine, State::of(2, kSizes), nth);
    EXPECT_TRUE(status.ok() || fails(status, Code::kNoSpace, "no host memory")) << nth;
    refused += status.ok() ? 0 : 1;
    expect_as_new(&engine, 3);
    if (HasFailure()) return;
  }
  EXPECT_GT(refused, 3u) << "of the writes, the record and the slot";
}

// The commit may have written its slot when it ends: as long as that names an area, nobody else may
// have the area. Here the next version has another slot, but finds room in the same area.
TEST_F(Memory, a_slot_that_a_failed_commit_has_written_names_nothing_that_is_overwritten) {
  for (uint64_t nth = 1; nth == 1 || asked >= nth - 1; ++nth) {
    TestEngine engine(1, Granularity::kPage);
    const State small = State::of(1, {100});
    ASSERT_TRUE(is_ok(engine.save(small)));
    ASSERT_TRUE(is_ok(engine.store()->pin(1, true)));
    expect_as_new(&engine, 2);
    const Status status = save(&engine, State::of(3, kSizes), nth);
    ASSERT_TRUE(is_ok(engine.store()->pin(1, false)));
    expect_as_new(&engine, 4);
    const Version latest = engine.latest();
    for (uint32_t index = 0; index < engine.store()->header().slot_count; ++index) {
      Slot slot;
      std::memcpy(&slot, engine.media->view() + slot_offset(index), sizeof(slot));
      if (!is_slot(engine.store()->header(), slot)) continue;
      const uint32_t* table = nullptr;
      Bytes host;
      EXPECT_TRUE(is_ok(decode_record(*engine.media, slot, *latest.layout, &table, &host)))
          << "slot " << index << ", after " << nth << ": " << status.message();
    }
    if (HasFailure()) return;
  }
}

TEST_F(Memory, a_host_state_that_finds_none_leaves_the_version_in_flight) {
  TestEngine engine(1);
  const State state = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(engine.begin(state)));
  ASSERT_TRUE(is_ok(engine.run(Op::kWrite, 0, state)));
  own_thread = false;
  asked = 0;
  refuse = kEach;
  uint64_t batch = 0;
  EXPECT_THROW((void)engine->queue_commit(state.host, &batch), std::bad_alloc);
  refuse = kNone;
  own_thread = true;
  ASSERT_TRUE(is_ok(engine.commit(state)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

}  // namespace
}  // namespace lightckpt
