// Media's primitives and RangeSet. Goal: a trace holds all that reaches a media, in the order in
// which it does, and no line is left in a cache that a drain should find flushed. Method: RangeSet
// against a set of units, by seed; each primitive against the events it must cause, at every
// granularity; and the lines that a copy leaves ragged against the flushes that follow it.
#include "media.h"

#include <gtest/gtest.h>

#include <set>

#include "crc32c.h"
#include "file_media.h"
#include "test_media.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 16 * 1024;

std::string name_of(EventKind kind) {
  switch (kind) {
    case EventKind::kStore:
      return "store";
    case EventKind::kNtCopy:
      return "nt_copy";
    case EventKind::kFlush:
      return "flush";
    case EventKind::kFence:
      return "fence";
    case EventKind::kDmaDone:
      return "dma_done";
    case EventKind::kSync:
      return "sync";
  }
  return "?";
}

// "store 8+4, fence" and so on: what tests below compare.
std::string words_of(const std::vector<EventLog::Event>& events) {
  std::string words;
  for (const auto& event : events) {
    if (!words.empty()) words += ", ";
    words += name_of(event.kind);
    if (event.kind == EventKind::kFence) continue;
    words += " " + std::to_string(event.offset) + "+" + std::to_string(event.bytes);
  }
  return words;
}

TEST(RangeSet, joins_what_touches_and_keeps_apart_what_does_not) {
  RangeSet set;
  set.add(10, 20);
  set.add(30, 40);
  EXPECT_EQ(set.ranges().size(), 2u);
  set.add(20, 30);
  EXPECT_EQ(set.ranges().size(), 1u);
  EXPECT_TRUE(set.contains(10, 40));
  EXPECT_FALSE(set.contains(9, 40));
  EXPECT_FALSE(set.contains(10, 41));
  set.add(50, 50);
  EXPECT_EQ(set.ranges().size(), 1u) << "an empty range adds nothing";
}

TEST(RangeSet, random_sequences_follow_a_set_of_units) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    RangeSet set;
    std::set<uint64_t> units;
    for (int turn = 0; turn < 40; ++turn) {
      const uint64_t begin = random() % 100, end = begin + random() % 20;
      set.add(begin, end);
      for (uint64_t unit = begin; unit < end; ++unit) units.insert(unit);

      uint64_t covered = 0, previous_end = 0;
      for (const auto& [first, last] : set.ranges()) {
        ASSERT_LT(first, last) << "seed " << seed;
        ASSERT_TRUE(covered == 0 || first > previous_end) << "seed " << seed << ": not joined";
        for (uint64_t unit = first; unit < last; ++unit) ASSERT_TRUE(units.contains(unit));
        covered += last - first;
        previous_end = last;
      }
      ASSERT_EQ(covered, units.size()) << "seed " << seed;

      const uint64_t from = random() % 120, to = from + 1 + random() % 10;
      bool all = true;
      for (uint64_t unit = from; unit < to; ++unit) all = all && units.contains(unit);
      ASSERT_EQ(set.contains(from, to), all) << "seed " << seed << ": " << from << " to " << to;
    }
    EXPECT_EQ(set.empty(), units.empty());
  }
}

struct Primitives : testing::TestWithParam<Granularity> {
  Primitives() : media(kBytes, kBytes, GetParam()) { media.set_trace(&log); }
  bool on_pages() const { return GetParam() == Granularity::kPage; }

  TestMedia media;
  EventLog log;
};

INSTANTIATE_TEST_SUITE_P(AtEachGranularity, Primitives,
                         testing::Values(Granularity::kByte, Granularity::kCacheLine,
                                         Granularity::kPage, Granularity::kVolatile));

TEST_P(Primitives, what_is_written_is_in_view) {
  const Buffer data = random_bytes(5000, 1);
  media.store(3, data);
  EXPECT_TRUE(std::ranges::equal(data, Bytes(media.view() + 3, data.size())));
  media.nt_copy(8200, data);
  EXPECT_TRUE(std::ranges::equal(data, Bytes(media.view() + 8200, data.size())));
  EXPECT_EQ(media.nt_copy_crc(6001, data), crc32c(0, data.data(), data.size()));
  EXPECT_TRUE(std::ranges::equal(data, Bytes(media.view() + 6001, data.size())));
}

TEST_P(Primitives, each_is_one_event_with_its_bytes) {
  const Buffer data = random_bytes(128, 2);
  media.store(5, data);
  auto events = log.take();
  EXPECT_EQ(words_of(events), "store 5+128");
  EXPECT_EQ(events[0].data, data);
  media.flush(5, 128);
  EXPECT_EQ(words_of(log.take()), "flush 5+128");
  media.fence();
  EXPECT_EQ(words_of(log.take()), "fence");
  media.dma_done(64, 100);
  EXPECT_EQ(words_of(log.take()), "dma_done 64+100, flush 64+100");
}

TEST_P(Primitives, a_copy_of_whole_lines_needs_no_flush_but_on_pages) {
  const Buffer data = random_bytes(128, 3);
  media.nt_copy(64, data);
  EXPECT_EQ(words_of(log.take()), on_pages() ? "nt_copy 64+128, flush 64+128" : "nt_copy 64+128");
  media.nt_copy_crc(64, data);
  auto events = log.take();
  EXPECT_EQ(words_of(events), on_pages() ? "nt_copy 64+128, flush 64+128" : "nt_copy 64+128");
  EXPECT_EQ(events[0].data, data);
}

// A byte needs a flush if it was written by a plain store: those of lines not written whole.
TEST_P(Primitives, every_ragged_line_of_a_copy_is_flushed_and_nothing_beside_it) {
  for (uint64_t at = 0; at < 2 * kLineBytes; at += 3) {
    for (uint64_t bytes = 1; bytes < 4 * kLineBytes; ++bytes) {
      const Buffer data = random_bytes(bytes, bytes);
      if (bytes % 2 == 0) media.nt_copy(at, data);
      if (bytes % 2 == 1) media.nt_copy_crc(at, data);
      RangeSet flushed;
      for (const auto& event : log.take()) {
        if (event.kind != EventKind::kFlush || event.bytes == 0) continue;
        flushed.add(event.offset, event.offset + event.bytes);
        EXPECT_TRUE(event.offset >= at && event.offset + event.bytes <= at + bytes);
      }
      for (uint64_t byte = at; byte < at + bytes; ++byte) {
        const uint64_t line = byte / kLineBytes * kLineBytes;
        const bool whole = line >= at && line + kLineBytes <= at + bytes;
        if (on_pages() || !whole) {
          ASSERT_TRUE(flushed.contains(byte, byte + 1)) << bytes << " bytes at " << at;
        }
      }
    }
  }
}

TEST_P(Primitives, a_drain_fences_and_on_pages_syncs_what_was_flushed_since_the_last) {
  std::vector<std::pair<uint64_t, uint64_t>> synced;
  media.on_sync = [&](uint64_t offset, uint64_t bytes) {
    synced.emplace_back(offset, bytes);
    return Status();
  };
  const Buffer data = random_bytes(100, 4);
  media.store(0, data);  // never flushed
  media.flush(4096, 100);
  media.nt_copy(4196, data);
  media.dma_done(8192, 10);
  log.take();
  ASSERT_TRUE(is_ok(media.drain()));
  EXPECT_EQ(words_of(log.take()), on_pages() ? "fence, sync 4096+200, sync 8192+10" : "fence");
  EXPECT_EQ(synced.size(), on_pages() ? 2u : 0u);
  ASSERT_TRUE(is_ok(media.drain()));
  EXPECT_EQ(words_of(log.take()), "fence") << "all of it was drained";
}

TEST_P(Primitives, an_event_is_seen_before_it_takes_effect) {
  struct Look final : MediaTrace {
    void on_event(const MediaEvent& event) override {
      if (event.kind == EventKind::kStore) before = media->view()[event.offset];
    }
    Media* media = nullptr;
    std::byte before{1};
  } look;
  look.media = &media;
  media.set_trace(&look);
  media.store(0, Buffer(1, std::byte{7}));
  EXPECT_EQ(look.before, std::byte{0});
  EXPECT_EQ(media.view()[0], std::byte{7});
}

TEST_P(Primitives, writing_outside_the_media_stops_the_process) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Buffer data(64);
  EXPECT_DEATH(media.store(kBytes - 63, data), "broken invariant");
  EXPECT_DEATH(media.nt_copy(kBytes - 63, data), "broken invariant");
  EXPECT_DEATH(media.nt_copy_crc(UINT64_MAX - 10, data), "broken invariant");
}

// What the kernel could not write it may have thrown away, so a second try proves nothing.
TEST(Drain, a_failed_one_is_final) {
  TestMedia media(kBytes, kBytes, Granularity::kPage);
  int syncs = 0;
  media.on_sync = [&](uint64_t, uint64_t) {
    return ++syncs == 1 ? Status(Code::kIo, "the disk is gone") : Status();
  };
  media.flush(0, 64);
  media.flush(8192, 64);
  EXPECT_TRUE(fails(media.drain(), Code::kLost, "the disk is gone"));
  EXPECT_TRUE(fails(media.drain(), Code::kLost, "the disk is gone"))
      << "the range is still unknown";
  media.flush(4096, 64);
  EXPECT_TRUE(fails(media.drain(), Code::kLost, "the disk is gone"));
  EXPECT_FALSE(media.shaken());
  EXPECT_TRUE(fails(media.recover(), Code::kLost, "the disk is gone"));
  EXPECT_TRUE(fails(media.drain(), Code::kLost, "the disk is gone"));
}

TEST(Drain, one_that_failed_for_want_of_space_is_final_until_it_is_recovered_from) {
  TestMedia media(kBytes, kBytes, Granularity::kPage);
  std::vector<uint64_t> synced;
  media.on_sync = [&](uint64_t offset, uint64_t) {
    synced.push_back(offset);
    return synced.size() == 2 ? Status(Code::kNoSpace, "the disk is full") : Status();
  };
  for (uint64_t offset : {0, 8192, 32768}) media.flush(offset, 64);
  EXPECT_TRUE(fails(media.drain(), Code::kNoSpace, "the disk is full"));
  EXPECT_TRUE(media.shaken());
  media.flush(4096, 64);
  EXPECT_TRUE(fails(media.drain(), Code::kNoSpace, "the disk is full")) << "though there is room";
  ASSERT_TRUE(is_ok(media.recover()));
  EXPECT_FALSE(media.shaken());
  synced = {1, 1};  // so that none fails
  ASSERT_TRUE(is_ok(media.drain()));
  EXPECT_EQ(synced, (std::vector<uint64_t>{1, 1, 0, 4096, 8192, 32768})) << "none was forgotten";
}

// The failure of one thread's drain must reach the thread whose drain waited for it.
TEST(Drain, one_that_waited_for_a_failed_one_fails_too) {
  TestMedia media(kBytes, kBytes, Granularity::kPage);
  std::atomic<int> fences = 0;
  Gate second_fence(
      [&](const MediaEvent& e) { return e.kind == EventKind::kFence && ++fences == 2; });
  media.set_trace(&second_fence);
  media.on_sync = [&](uint64_t offset, uint64_t) {
    if (offset != 0) return Status();
    EXPECT_TRUE(second_fence.wait_held());
    second_fence.open();
    return Status(Code::kIo, "the disk is gone");
  };
  media.flush(0, 64);
  Status first, second;
  std::thread one([&] { first = media.drain(); });
  // Its fence comes second or first; either way one drain holds the range that fails.
  std::thread other([&] { second = media.drain(); });
  one.join();
  other.join();
  EXPECT_TRUE(fails(first, Code::kLost));
  EXPECT_TRUE(fails(second, Code::kLost));
}

TEST(HeapMedia, grows_in_place_up_to_its_capacity) {
  HeapMedia media(4096, 8192);
  const std::byte* before = media.view();
  media.store(0, Buffer(10, std::byte{9}));
  ASSERT_TRUE(is_ok(media.grow(8192)));
  EXPECT_EQ(media.view(), before);
  EXPECT_EQ(media.size(), 8192u);
  EXPECT_EQ(media.view()[9], std::byte{9});
  EXPECT_TRUE(fails(media.grow(8193), Code::kNoSpace, "8193"));
  EXPECT_EQ(media.size(), 8192u);
  ASSERT_TRUE(is_ok(media.grow(100)));
  EXPECT_EQ(media.size(), 8192u) << "it never shrinks";
}

}  // namespace
}  // namespace lightckpt
