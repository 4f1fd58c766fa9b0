// What a reader writes to his own pages. Goal: it is seen through them only, for as long as he
// reads that version; what the store is asked for is always the store's, and another version that
// comes to lie there is never mistaken. Method: a writer whose areas take turns, and a reader of
// the same file that writes wherever it may.
#include <gtest/gtest.h>

#include "store_helpers.h"

namespace lightckpt {
namespace {

// Two extents that share a page: an area's pages go together.
const std::vector<uint64_t> kSizes = {300, 5000};

struct ReaderPages : testing::Test {
  ReaderPages() {
    StoreOptions options;
    options.create = true;
    EXPECT_TRUE(is_ok(Store::open(path, options, &writer)));
    EXPECT_TRUE(is_ok(save(writer.get(), State::of(1, kSizes), 1)));
    options = {};
    options.read_only = true;
    EXPECT_TRUE(is_ok(Store::open(path, options, &reader)));
  }

  std::span<std::byte> located(uint64_t version, uint32_t extent) {
    std::span<std::byte> bytes;
    EXPECT_TRUE(is_ok(reader->locate(version, extent, &bytes)));
    return bytes;
  }
  bool shows(uint64_t version, uint64_t step) {
    const State state = State::of(step, kSizes);
    return std::ranges::equal(located(version, 0), state.extents[0]) &&
           std::ranges::equal(located(version, 1), state.extents[1]);
  }
  void scribble(uint64_t version) {
    for (uint32_t extent : {0u, 1u}) std::ranges::fill(located(version, extent), std::byte{99});
  }
  // The version that lies where version 1 lay, as soon as the areas' turn comes.
  uint64_t next_in_the_same_place(uint64_t offset) {
    for (uint64_t step = 2;; ++step) {
      EXPECT_TRUE(is_ok(save(writer.get(), State::of(step, kSizes), 1)));
      if (writer->versions().front().slot.record_offset == offset) return step;
      CHECK(step < 10);
    }
  }

  TempFolder folder{memory_folder()};
  const std::string path = folder.file("store");
  std::unique_ptr<Store> writer, reader;
};

TEST_F(ReaderPages, what_is_written_stays_his_and_is_not_verified) {
  ASSERT_TRUE(is_ok(reader->pin(1, true)));
  scribble(1);
  EXPECT_EQ(located(1, 0)[0], std::byte{99});
  EXPECT_EQ(located(1, 1)[4999], std::byte{99}) << "locating one extent takes nothing from another";
  EXPECT_TRUE(holds(reader.get(), reader->versions().front(), State::of(1, kSizes)));
  EXPECT_TRUE(holds(writer.get(), writer->versions().front(), State::of(1, kSizes)));
  ASSERT_TRUE(is_ok(reader->pin(1, true))) << "a second pin beside the first";
  EXPECT_EQ(located(1, 0)[0], std::byte{99});
}

TEST_F(ReaderPages, a_version_that_is_pinned_for_the_first_time_shows_the_store) {
  ASSERT_TRUE(is_ok(reader->pin(1, true)));
  scribble(1);
  ASSERT_TRUE(is_ok(reader->pin(1, false)));
  ASSERT_TRUE(is_ok(reader->pin(1, true)));
  EXPECT_TRUE(shows(1, 1));
}

TEST_F(ReaderPages, a_newer_version_in_the_same_place_shows_the_store) {
  const uint64_t offset = reader->versions().front().slot.record_offset;
  for (bool pinned : {true, false}) {
    const uint64_t first = reader->versions().front().slot.version;
    const Status pin = pinned ? reader->pin(first, true) : Status();
    ASSERT_TRUE(is_ok(pin));
    scribble(first);
    const Status unpin = pinned ? reader->pin(first, false) : Status();
    ASSERT_TRUE(is_ok(unpin));
    const uint64_t next = next_in_the_same_place(offset);
    const Version newer = reader->versions().front();
    ASSERT_EQ(newer.slot.record_offset, offset);
    EXPECT_TRUE(holds(reader.get(), newer, State::of(next, kSizes)));
    EXPECT_TRUE(shows(newer.slot.version, next)) << "located without a pin";
    if (!pinned) break;
    ASSERT_TRUE(is_ok(reader->pin(newer.slot.version, true)));
    EXPECT_TRUE(shows(newer.slot.version, next)) << "and with one";
    ASSERT_TRUE(is_ok(reader->pin(newer.slot.version, false)));
  }
}

TEST_F(ReaderPages, a_rebase_leaves_the_pages_of_the_version_that_it_chose) {
  ASSERT_TRUE(is_ok(reader->pin(1, true)));
  scribble(1);
  ASSERT_TRUE(is_ok(save(writer.get(), State::of(2, kSizes), 1)));
  ASSERT_TRUE(is_ok(writer->rebase(1)));
  ASSERT_EQ(list_of(reader->versions()), "1.1");
  EXPECT_EQ(located(1, 0)[0], std::byte{99}) << "it lies where it lay, and is the same";
  ASSERT_TRUE(is_ok(reader->pin(1, true)));
  EXPECT_EQ(located(1, 0)[0], std::byte{99}) << "the first pin of its new slot is not of its area";
}

TEST_F(ReaderPages, a_writer_has_none) {
  std::span<std::byte> bytes;
  ASSERT_TRUE(is_ok(writer->locate(1, 0, &bytes)));
  const Version version = writer->versions().front();
  EXPECT_EQ(bytes.data(), writer->media().view() + version.slot.record_offset +
                              version.layout->extent_offsets[0]);
  EXPECT_TRUE(fails(writer->locate(1, 2, &bytes), Code::kInvalid, "extent 2 of 2"));
  EXPECT_TRUE(fails(writer->locate(9, 0, &bytes), Code::kNotFound, "no version 9"));
}

}  // namespace
}  // namespace lightckpt
