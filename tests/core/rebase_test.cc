// Rebase. Goal: an older version becomes the latest by one line, in a new generation, and whoever
// reads or pins anything loses nothing by it. Method: heap stores for what one handle sees; where
// other readers matter, a file, because readers meet through its lock. A restart is a store opened
// on a copy of the bytes.
#include <gtest/gtest.h>

#include "store_helpers.h"

namespace lightckpt {
namespace {

const std::vector<uint64_t> kSizes = {5000, 0, 300};
constexpr uint64_t kBytes = 256 * 1024;

void save_steps(Store* store, uint64_t first, uint64_t last, uint32_t keep) {
  for (uint64_t step = first; step <= last; ++step) {
    ASSERT_TRUE(is_ok(save(store, State::of(step, kSizes), keep)));
  }
}

testing::AssertionResult latest_is_of(Store* store, uint64_t step) {
  return holds(store, store->versions().front(), State::of(step, kSizes));
}

std::unique_ptr<Store> store_of_three() {
  auto store = heap_store(kBytes, kBytes);
  save_steps(store.get(), 1, 3, 2);
  EXPECT_EQ(list_of(store->versions()), "3.0 2.0 1.0");
  return store;
}

struct OnFile : testing::Test {
  std::unique_ptr<Store> opened(bool read_only, uint32_t slots = 16) {
    StoreOptions options;
    options.slots = slots;
    options.create = true;
    options.read_only = read_only;
    options.bytes = kBytes;
    std::unique_ptr<Store> store;
    EXPECT_TRUE(is_ok(Store::open(folder.file("store"), options, &store)));
    return store;
  }

  TempFolder folder;
};

TEST(Rebase, an_older_version_becomes_the_latest_and_newer_ones_go) {
  const auto store = store_of_three();
  ASSERT_TRUE(is_ok(store->rebase(2)));
  EXPECT_EQ(list_of(store->versions()), "2.1 1.0");
  EXPECT_TRUE(latest_is_of(store.get(), 2));
  EXPECT_TRUE(holds(store.get(), store->versions().back(), State::of(1, kSizes)));
  const auto again = reopened(store.get());
  EXPECT_EQ(list_of(again->versions()), "2.1 1.0");
  EXPECT_TRUE(latest_is_of(again.get(), 2));
}

TEST(Rebase, the_next_versions_follow_it_in_its_generation) {
  const auto store = store_of_three();
  ASSERT_TRUE(is_ok(store->rebase(1)));
  EXPECT_EQ(list_of(store->versions()), "1.1");
  for (uint64_t step = 10; step < 15; ++step) {
    ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), 2)));
    EXPECT_EQ(store->versions().front().slot.generation, 1u);
    EXPECT_TRUE(latest_is_of(store.get(), step));
    EXPECT_TRUE(latest_is_of(reopened(store.get()).get(), step));
  }
  ASSERT_TRUE(is_ok(store->rebase(store->versions().back().slot.version)));
  EXPECT_EQ(store->versions().front().slot.generation, 2u);
  EXPECT_TRUE(latest_is_of(store.get(), 12));
}

TEST(Rebase, the_latest_is_the_latest_already) {
  const auto store = store_of_three();
  const Buffer before(all_of(store.get()).begin(), all_of(store.get()).end());
  ASSERT_TRUE(is_ok(store->rebase(3)));
  EXPECT_TRUE(std::ranges::equal(before, all_of(store.get())));
}

TEST(Rebase, what_is_not_there_is_not_found) {
  const auto store = store_of_three();
  EXPECT_TRUE(fails(store->rebase(4), Code::kNotFound, "no version 4"));
  EXPECT_TRUE(fails(store->rebase(0), Code::kNotFound, "no version 0"));
  EXPECT_EQ(list_of(store->versions()), "3.0 2.0 1.0");
}

TEST(Rebase, the_space_of_those_that_went_is_free) {
  const auto store = heap_store(kBytes, kBytes);
  save_steps(store.get(), 1, 1, 2);
  const uint64_t with_one = store->free_bytes();
  save_steps(store.get(), 2, 3, 2);
  ASSERT_TRUE(is_ok(store->rebase(1)));
  EXPECT_EQ(store->free_bytes(), with_one);
}

TEST(Rebase, keep_further_versions_are_made_as_ever) {
  const auto store = store_of_three();
  ASSERT_TRUE(is_ok(store->rebase(2)));
  save_steps(store.get(), 20, 30, 2);
  EXPECT_EQ(store->versions().size(), 3u);
  for (const Version& version : store->versions()) {
    EXPECT_TRUE(holds(store.get(), version, State::of(version.slot.step, kSizes)));
  }
}

TEST_F(OnFile, a_newer_version_that_is_read_stays_until_it_is_let_go_and_is_never_the_latest) {
  const auto writer = opened(false);
  save_steps(writer.get(), 1, 3, 2);
  const auto reader = opened(true);
  ASSERT_TRUE(is_ok(reader->pin(3, true)));
  Version held;
  ASSERT_TRUE(is_ok(reader->find(3, &held)));
  ASSERT_TRUE(is_ok(writer->rebase(2)));
  EXPECT_EQ(list_of(writer->versions()), "2.1 3.0 1.0");
  EXPECT_EQ(list_of(reader->versions()), "2.1 3.0 1.0");
  for (uint64_t step = 20; step < 25; ++step) {
    save_steps(writer.get(), step, step, 1);
    EXPECT_TRUE(latest_is_of(writer.get(), step));
    EXPECT_TRUE(latest_is_of(reopened(writer.get()).get(), step));
    EXPECT_TRUE(holds(reader.get(), held, State::of(3, kSizes)));
  }
  ASSERT_TRUE(is_ok(reader->pin(3, false)));
  save_steps(writer.get(), 25, 25, 1);
  EXPECT_EQ(writer->versions().size(), 2u) << list_of(writer->versions());
}

TEST_F(OnFile, a_version_that_was_given_up_is_kept_in_place_of_no_other) {
  const auto writer = opened(false);
  save_steps(writer.get(), 1, 3, 2);
  const auto reader = opened(true);
  ASSERT_TRUE(is_ok(reader->pin(3, true)));
  ASSERT_TRUE(is_ok(writer->rebase(2)));
  Attempt attempt;
  ASSERT_TRUE(is_ok(begin(writer.get(), State::of(20, kSizes), 2, &attempt)));
  EXPECT_EQ(list_of(writer->versions()), "2.1 3.0 1.0") << "two, and what is being read";
}

TEST_F(OnFile, a_reader_of_the_chosen_version_keeps_it) {
  const auto writer = opened(false);
  save_steps(writer.get(), 1, 3, 2);
  const auto reader = opened(true);
  ASSERT_TRUE(is_ok(reader->pin(2, true)));
  Version held;
  ASSERT_TRUE(is_ok(reader->find(2, &held)));
  ASSERT_TRUE(is_ok(writer->rebase(2)));
  EXPECT_TRUE(latest_is_of(writer.get(), 2));
  save_steps(writer.get(), 20, 30, 1);
  EXPECT_TRUE(holds(reader.get(), held, State::of(2, kSizes)));
  ASSERT_TRUE(is_ok(reader->pin(2, false)));
  save_steps(writer.get(), 31, 32, 1);
  EXPECT_EQ(writer->versions().size(), 2u) << "it goes when it is let go";
}

// A version that is named by two slots is still one version.
TEST_F(OnFile, a_reader_of_the_chosen_version_costs_no_kept_one) {
  const auto writer = opened(false);
  save_steps(writer.get(), 1, 3, 2);
  const auto reader = opened(true);
  ASSERT_TRUE(is_ok(reader->pin(2, true)));
  ASSERT_TRUE(is_ok(writer->rebase(2)));
  Attempt attempt;
  ASSERT_TRUE(is_ok(begin(writer.get(), State::of(20, kSizes), 2, &attempt)));
  Version found;
  EXPECT_TRUE(is_ok(writer->find(2, &found)));
  EXPECT_TRUE(is_ok(writer->find(1, &found))) << "two are kept: " << list_of(writer->versions());
}

TEST(Rebase, a_pin_of_the_chosen_version_goes_with_it) {
  const auto store = store_of_three();
  ASSERT_TRUE(is_ok(store->pin(2, true)));
  ASSERT_TRUE(is_ok(store->rebase(2)));
  save_steps(store.get(), 20, 25, 1);
  Version found;
  ASSERT_TRUE(is_ok(store->find(2, &found))) << list_of(store->versions());
  EXPECT_TRUE(holds(store.get(), found, State::of(2, kSizes)));
}

TEST_F(OnFile, a_refused_one_drops_no_pin) {
  const auto writer = opened(false, 4);
  const auto reader = opened(true);
  for (uint64_t step = 1; step <= 3; ++step) {
    save_steps(writer.get(), step, step, 1);
    ASSERT_TRUE(is_ok(reader->pin(step, true)));
    ASSERT_TRUE(is_ok(writer->pin(step, true)));
  }
  ASSERT_TRUE(is_ok(writer->rebase(2)));  // into the last slot, and none of the others goes
  const auto pins = [&] {
    std::string here;
    for (const Version& version : writer->versions()) {
      here += writer->pinned_here(version.index) ? 'x' : '-';
    }
    return list_of(writer->versions()) + " " + here;
  };
  const std::string before = pins();
  EXPECT_EQ(before, "2.1 3.0 1.0 x-x");
  EXPECT_TRUE(fails(writer->rebase(1), Code::kBusy, "no free slot"));
  EXPECT_TRUE(fails(writer->rebase(9), Code::kNotFound));
  EXPECT_EQ(pins(), before);
}

// The slot that an attempt will be committed to is taken, though no version has it yet.
TEST(Rebase, one_during_an_attempt_loses_no_version) {
  const auto store = store_of_three();
  const State state = State::of(20, kSizes);
  Attempt attempt;
  ASSERT_TRUE(is_ok(begin(store.get(), state, 2, &attempt)));
  const auto table = write_extents(store.get(), attempt, state);
  const Status rebased = store->rebase(2);
  ASSERT_TRUE(is_ok(store->commit(attempt, table, state.host)));
  const auto again = reopened(store.get());
  EXPECT_EQ(list_of(again->versions()), list_of(store->versions()));
  EXPECT_TRUE(latest_is_of(again.get(), 20));
  Version found;
  EXPECT_TRUE(is_ok(again->find(2, &found)))
      << list_of(again->versions()) << "; rebase said: " << rebased.message();
}

// A crash between the line that makes it the latest and the retiring of the newer ones.
TEST(Rebase, leftovers_of_the_old_generation_stand_behind_it) {
  const auto store = store_of_three();
  const Version chosen = store->versions()[1];
  Slot renewed = chosen.slot;
  renewed.generation = 1;
  renewed = encode_slot(renewed);
  store->media().store(slot_offset(7), std::as_bytes(std::span(&renewed, 1)));
  const auto again = reopened(store.get());
  EXPECT_EQ(list_of(again->versions()), "2.1 3.0 1.0");
  EXPECT_TRUE(latest_is_of(again.get(), 2));
  ASSERT_TRUE(is_ok(save(again.get(), State::of(20, kSizes), 1)));
  EXPECT_EQ(list_of(again->versions()), "3.1 2.1");
  EXPECT_TRUE(latest_is_of(again.get(), 20));
  EXPECT_TRUE(holds(again.get(), again->versions().back(), State::of(2, kSizes)));
}

}  // namespace
}  // namespace lightckpt
