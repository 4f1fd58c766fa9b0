// A source that is edited while workers copy it. Goal: whatever the bytes of a version then are,
// they are those of its checksums: an engine may not know of the edit, but it never commits what
// its own checksums refuse. Method: a thread that edits all the time, beside saves and reads of
// every granularity; and edits between the events of the media, where each piece begins.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "engine.h"
#include "engine_helpers.h"

namespace lightckpt {
namespace {

const std::vector<uint64_t> kSizes = {4 * kChunkBytes + 77, 300, kChunkBytes - 5, 64, 9};

// Not watched by TSan: the race is what is tried here.
__attribute__((no_sanitize("thread"))) void edit(State* state, const std::atomic<bool>& stop) {
  for (uint8_t value = 0; !stop; ++value) {
    for (Buffer& extent : state->extents) {
      volatile std::byte* const bytes = extent.data();
      for (size_t i = 0; i < extent.size(); ++i) bytes[i] = std::byte{value};
    }
  }
}

class EngineEdit : public testing::TestWithParam<Granularity> {};

TEST_P(EngineEdit, a_committed_version_has_the_bytes_of_its_checksums) {
  TestEngine engine(2, GetParam(), 64 << 20);
  State state = State::of(1, kSizes);
  std::atomic<bool> stop = false;
  std::thread editor(edit, &state, std::cref(stop));
  for (uint64_t step = 1; step <= 8; ++step) {
    state.step = step;
    EXPECT_TRUE(is_ok(engine.save(state)));
    EXPECT_TRUE(is_ok(engine.run(Op::kVerify, step, blank(State::of(1, kSizes))))) << step;
  }
  stop = true;
  editor.join();
}

INSTANTIATE_TEST_SUITE_P(Each, EngineEdit,
                         testing::Values(Granularity::kVolatile, Granularity::kCacheLine,
                                         Granularity::kPage),
                         [](const auto& granularity) {
                           switch (granularity.param) {
                             case Granularity::kVolatile:
                               return "volatile";
                             case Granularity::kCacheLine:
                               return "cache_line";
                             default:
                               return "page";
                           }
                         });

// What is read is compared as it lies in the reader's memory, not as it lay on the media.
TEST(EngineEditOfMedia, a_read_that_is_right_has_the_bytes_of_the_checksums) {
  TestEngine engine(2, Granularity::kVolatile, 64 << 20);
  const State state = State::of(1, {8 * kChunkBytes});
  ASSERT_TRUE(is_ok(engine.save(state)));
  const Version version = engine.latest();
  volatile std::byte* const stored =
      engine.media->memory() + version.slot.record_offset + version.layout->extent_offsets[0];
  std::atomic<bool> stop = false;
  std::thread editor([&]() __attribute__((no_sanitize("thread"))) {
    for (uint64_t at = 0; !stop; at = (at + 4099) % (8 * kChunkBytes)) {
      const std::byte before = stored[at];
      stored[at] = ~before;
      stored[at] = before;
    }
  });
  int right = 0;
  for (int i = 0; i < 12; ++i) {
    State back = blank(state);
    if (!engine.run(Op::kRead, 1, back).ok()) continue;
    ++right;
    EXPECT_EQ(back.extents, state.extents);
  }
  stop = true;
  editor.join();
  RecordProperty("right", right);
}

}  // namespace
}  // namespace lightckpt
