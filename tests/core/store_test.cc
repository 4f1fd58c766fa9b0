// Store. Goal: a version, once committed, is there byte for byte until keep newer ones are;
// whatever is refused changes nothing; and what a restart finds is what there was. Method: states
// made from their step are saved into heap media, and each version that is listed is compared
// whole; a restart is a store opened on a copy of the bytes. Rebase and failures have files of
// their own.
#include "store.h"

#include <gtest/gtest.h>

#include <set>

#include "store_helpers.h"

namespace lightckpt {
namespace {

constexpr uint64_t kSmall = 68 * 1024 + 64 * 1024;  // header, 16 slots and some room
constexpr uint64_t kRoomy = 8 << 20;
const std::vector<uint64_t> kSizes = {5000, 0, 300, 70'000, 1};

// Every version listed is of the step that was saved for it, and whole.
void expect_all_whole(Store* store, const std::vector<uint64_t>& sizes) {
  for (const Version& version : store->versions()) {
    EXPECT_TRUE(holds(store, version, State::of(version.slot.step, sizes)));
  }
}

TEST(Store, a_commit_makes_the_latest_version) {
  const auto store = heap_store(kSmall, kRoomy);
  EXPECT_TRUE(store->versions().empty());
  for (uint64_t step : {10, 20, 25}) {
    const State state = State::of(step, kSizes);
    ASSERT_TRUE(is_ok(save(store.get(), state, 2)));
    EXPECT_TRUE(holds(store.get(), store->versions().front(), state));
  }
  EXPECT_EQ(list_of(store->versions()), "3.0 2.0 1.0");
  Version found;
  ASSERT_TRUE(is_ok(store->find(2, &found)));
  EXPECT_TRUE(holds(store.get(), found, State::of(20, kSizes)));
  EXPECT_TRUE(fails(store->find(4, &found), Code::kNotFound, "no version 4"));
}

TEST(Store, states_of_any_shape_come_back) {
  const std::vector<std::vector<uint64_t>> shapes = {
      {}, {0}, {0, 0, 0}, {1}, {kChunkBytes}, {kChunkBytes + 1, 3 * kChunkBytes - 1, 0, 64}};
  for (const auto& sizes : shapes) {
    for (uint64_t host_bytes : {0, 1, 64, 100'000}) {
      const auto store = heap_store(kSmall, 32 << 20);
      const State state = State::of(1, sizes, host_bytes);
      ASSERT_TRUE(is_ok(save(store.get(), state, 1)));
      EXPECT_TRUE(holds(store.get(), store->versions().front(), state));
      const auto again = reopened(store.get());
      EXPECT_TRUE(holds(again.get(), again->versions().front(), state));
    }
  }
}

TEST(Store, keep_versions_stay_restorable_while_the_next_is_made) {
  for (uint32_t keep : {1u, 2u, 3u}) {
    const auto store = heap_store(kSmall, kRoomy);
    for (uint64_t step = 1; step <= 10; ++step) {
      const State state = State::of(step, kSizes);
      Attempt attempt;
      ASSERT_TRUE(is_ok(begin(store.get(), state, keep, &attempt)));
      EXPECT_EQ(store->versions().size(), std::min<uint64_t>(keep, step - 1));
      const auto table = write_extents(store.get(), attempt, state);
      expect_all_whole(store.get(), kSizes);
      ASSERT_TRUE(is_ok(store->commit(attempt, table, state.host)));
      EXPECT_EQ(store->versions().size(), std::min<uint64_t>(keep + 1, step));
      EXPECT_EQ(store->versions().front().slot.step, step);
      expect_all_whole(store.get(), kSizes);
    }
  }
}

TEST(Store, fewer_are_kept_as_soon_as_that_is_asked_for) {
  const auto store = heap_store(kSmall, kRoomy);
  for (uint64_t step = 1; step <= 4; ++step) {
    ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), 3)));
  }
  ASSERT_TRUE(is_ok(save(store.get(), State::of(5, kSizes), 1)));
  EXPECT_EQ(list_of(store->versions()), "5.0 4.0");
}

// An attempt may write every byte of its area.
TEST(Store, an_attempts_area_overlaps_nothing_that_stays) {
  const auto store = heap_store(kSmall, kRoomy);
  for (uint64_t step = 1; step <= 12; ++step) {
    const uint32_t keep = 1 + step % 3;
    const std::vector<uint64_t> sizes = {step * 3000 % 40'000, 500 * step};
    const State state = State::of(step, sizes);
    if (step % 5 == 0) {
      ASSERT_TRUE(is_ok(store->pin(store->versions().front().slot.version, true)));
    }
    Attempt attempt;
    ASSERT_TRUE(is_ok(begin(store.get(), state, keep, &attempt)));
    const Buffer garbage = random_bytes(attempt.layout->area_bytes, step);
    store->media().nt_copy(attempt.slot.record_offset, garbage);
    const auto check = [&](Store* look) {
      for (const Version& version : look->versions()) {
        const uint64_t of = version.slot.step;
        EXPECT_TRUE(holds(look, version, State::of(of, {of * 3000 % 40'000, 500 * of})));
      }
    };
    check(store.get());
    check(reopened(store.get()).get());
    const auto table = write_extents(store.get(), attempt, state);
    ASSERT_TRUE(is_ok(store->commit(attempt, table, state.host)));
    check(store.get());
  }
}

TEST(Store, in_the_steady_state_the_same_areas_take_turns) {
  for (uint32_t keep : {1u, 2u}) {
    const auto store = heap_store(kSmall, kRoomy);
    std::set<uint64_t> areas, manifests;
    uint64_t bytes = 0, free_bytes = 0;
    for (uint64_t step = 1; step <= 20; ++step) {
      ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), keep)));
      const Version latest = store->versions().front();
      areas.insert(latest.slot.record_offset);
      manifests.insert(latest.slot.manifest_offset);
      if (step == 1) bytes = store->media().size();
      if (step <= keep + 1) free_bytes = store->free_bytes();
      EXPECT_EQ(store->media().size(), bytes) << "step " << step;
      EXPECT_EQ(store->free_bytes(), free_bytes) << "step " << step;
    }
    EXPECT_EQ(areas.size(), keep + 1);
    EXPECT_EQ(manifests.size(), 1u);
  }
}

TEST(Store, a_changed_structure_is_a_new_layout_and_old_versions_keep_theirs) {
  const auto store = heap_store(kSmall, kRoomy);
  const std::vector<uint64_t> other = {5000, 0, 300, 70'000, 1, 9000};
  ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 2)));
  ASSERT_TRUE(is_ok(save(store.get(), State::of(2, other), 2)));
  ASSERT_TRUE(is_ok(save(store.get(), State::of(3, kSizes), 2)));
  const std::vector<Version> versions = store->versions();
  ASSERT_EQ(versions.size(), 3u);
  EXPECT_TRUE(holds(store.get(), versions[0], State::of(3, kSizes)));
  EXPECT_TRUE(holds(store.get(), versions[1], State::of(2, other)));
  EXPECT_TRUE(holds(store.get(), versions[2], State::of(1, kSizes)));
  EXPECT_EQ(versions[0].slot.manifest_offset, versions[2].slot.manifest_offset);
  EXPECT_NE(versions[1].slot.manifest_offset, versions[2].slot.manifest_offset);
}

TEST(Store, structures_that_come_and_go_leak_no_space) {
  const auto store = heap_store(kSmall, 4 << 20);
  uint64_t used_bytes = 0;
  for (uint64_t round = 0; round < 30; ++round) {
    for (uint64_t shape = 1; shape <= 4; ++shape) {
      const State state = State::of(round * 10 + shape, {shape * 50'000, 100 * shape});
      ASSERT_TRUE(is_ok(save(store.get(), state, 1)));
      EXPECT_TRUE(holds(store.get(), store->versions().front(), state));
    }
    const uint64_t used = store->media().size() - store->free_bytes();
    if (round == 1) used_bytes = used;  // at the first, no version stood before
    EXPECT_EQ(used, round == 0 ? used : used_bytes) << "round " << round;
  }
}

TEST(Store, a_blob_that_changes_alone_is_stored_too) {
  const auto store = heap_store(kSmall, kRoomy);
  for (uint64_t step = 1; step <= 5; ++step) {
    State state = State::of(step, kSizes);
    state.blob = random_bytes(40, step);
    ASSERT_TRUE(is_ok(save(store.get(), state, 1)));
    EXPECT_TRUE(holds(store.get(), store->versions().front(), state));
  }
}

TEST(Store, an_outgrown_record_is_refused_and_gets_a_new_layout_at_the_next_begin) {
  const auto store = heap_store(kSmall, kRoomy);
  const State small = State::of(1, kSizes, 100);
  ASSERT_TRUE(is_ok(save(store.get(), small, 1)));
  const State large = State::of(2, kSizes, 50'000);
  Attempt attempt;
  ASSERT_TRUE(is_ok(store->begin(2, 1, kSizes, large.blob, 100, &attempt)));
  const auto table = write_extents(store.get(), attempt, large);
  EXPECT_TRUE(fails(store->commit(attempt, table, large.host), Code::kInvalid, "was laid out for"));
  EXPECT_EQ(list_of(store->versions()), "1.0");
  EXPECT_TRUE(holds(store.get(), store->versions().front(), small));
  ASSERT_TRUE(is_ok(save(store.get(), large, 1)));
  EXPECT_TRUE(holds(store.get(), store->versions().front(), large));
}

TEST(Store, a_host_state_may_grow_by_half_within_one_layout) {
  const auto store = heap_store(kSmall, kRoomy);
  ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes, 10'000), 1)));
  ASSERT_TRUE(is_ok(save(store.get(), State::of(2, kSizes, 14'900), 1)));
  const std::vector<Version> versions = store->versions();
  EXPECT_EQ(versions[0].slot.manifest_offset, versions[1].slot.manifest_offset);
}

TEST(Store, a_media_grows_as_versions_need_it) {
  const auto store = heap_store(kSmall, kRoomy);
  for (uint64_t step = 1; step <= 6; ++step) {
    const State state = State::of(step, {step * 200'000});
    const uint64_t before = store->media().size();
    ASSERT_TRUE(is_ok(save(store.get(), state, 1)));
    EXPECT_GT(store->media().size(), before);
    const auto again = reopened(store.get());
    EXPECT_TRUE(holds(again.get(), again->versions().front(), state));
  }
}

TEST(Store, too_little_room_is_said_at_the_first_version_and_changes_nothing) {
  const auto store = heap_store(kSmall, 400'000);
  const State state = State::of(1, {100'000});
  ASSERT_TRUE(is_ok(save(store.get(), state, 1)));
  ASSERT_TRUE(is_ok(save(store.get(), State::of(2, {100'000}), 1)));
  const Buffer before(all_of(store.get()).begin(), all_of(store.get()).end());
  Attempt attempt;
  for (const State& larger : {State::of(3, {150'000}), State::of(3, {uint64_t{1} << 20})}) {
    EXPECT_TRUE(fails(begin(store.get(), larger, 1, &attempt), Code::kNoSpace));
    EXPECT_EQ(list_of(store->versions()), "2.0 1.0");
    EXPECT_TRUE(std::ranges::equal(before, all_of(store.get())));
  }
  ASSERT_TRUE(is_ok(save(store.get(), State::of(4, {100'000}), 1))) << "what fitted still fits";
  expect_all_whole(store.get(), {100'000});
  // Room for one area of this size, not for the two that would take turns.
  EXPECT_TRUE(fails(begin(store.get(), State::of(5, {110'000}), 2, &attempt), Code::kNoSpace));
}

TEST(Store, sizes_that_overflow_do_not_fit) {
  const auto store = heap_store(kSmall, kRoomy);
  ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 1)));
  const std::vector<std::vector<uint64_t>> shapes = {{UINT64_MAX},
                                                     {UINT64_MAX - kChunkBytes},
                                                     {uint64_t{1} << 63, uint64_t{1} << 63},
                                                     {uint64_t{1} << 62},
                                                     {uint64_t{1} << 50, uint64_t{1} << 50}};
  Attempt attempt;
  for (const auto& sizes : shapes) {
    EXPECT_TRUE(fails(store->begin(2, 1, sizes, {}, 100, &attempt), Code::kNoSpace))
        << sizes.front();
  }
  EXPECT_TRUE(fails(store->begin(2, 1, {}, {}, UINT64_MAX, &attempt), Code::kNoSpace));
  EXPECT_TRUE(fails(store->begin(2, 1, {}, {}, uint64_t{1} << 32, &attempt), Code::kNoSpace));
  EXPECT_EQ(list_of(store->versions()), "1.0");
}

TEST(Store, keep_is_at_least_one_and_leaves_two_slots) {
  const auto store = heap_store(kSmall, kRoomy, 6);
  Attempt attempt;
  for (uint32_t keep : {0u, 5u, UINT32_MAX}) {
    EXPECT_TRUE(fails(begin(store.get(), State::of(1, kSizes), keep, &attempt), Code::kInvalid,
                      "can keep 1 to 4"));
  }
  for (uint64_t step = 1; step <= 10; ++step) {
    ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), 4)));
  }
  EXPECT_EQ(store->versions().size(), 5u);
  expect_all_whole(store.get(), kSizes);
}

TEST(Store, an_attempt_that_is_given_up_leaves_no_trace) {
  const auto store = heap_store(kSmall, kRoomy);
  ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 1)));
  const uint64_t free_bytes = store->free_bytes();
  for (uint64_t step = 2; step < 20; ++step) {
    const State state =
        State::of(step, step % 2 == 0 ? kSizes : std::vector<uint64_t>{step * 1000});
    Attempt attempt;
    ASSERT_TRUE(is_ok(begin(store.get(), state, 1, &attempt)));
    write_extents(store.get(), attempt, state);
    EXPECT_EQ(store->free_bytes(), free_bytes);
    const auto again = reopened(store.get());
    EXPECT_EQ(list_of(again->versions()), "1.0");
    EXPECT_TRUE(holds(again.get(), again->versions().front(), State::of(1, kSizes)));
  }
  ASSERT_TRUE(is_ok(save(store.get(), State::of(30, kSizes), 1)));
  EXPECT_EQ(list_of(store->versions()), "2.0 1.0");
}

TEST(Store, a_restart_finds_what_there_was) {
  auto store = heap_store(kSmall, kRoomy);
  for (uint64_t step = 1; step <= 12; ++step) {
    ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), 2)));
    auto again = reopened(store.get());
    ASSERT_EQ(list_of(again->versions()), list_of(store->versions()));
    expect_all_whole(again.get(), kSizes);
    EXPECT_EQ(again->free_bytes(), store->free_bytes());
    EXPECT_EQ(again->header().store_id, store->header().store_id);
    if (step % 4 == 0) store = std::move(again);  // and goes on from there
  }
}

TEST(Store, a_pinned_version_stays_until_it_is_let_go) {
  const auto store = heap_store(kSmall, kRoomy);
  ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 1)));
  ASSERT_TRUE(is_ok(store->pin(1, true)));
  for (uint64_t step = 2; step <= 6; ++step) {
    ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), 1)));
    expect_all_whole(store.get(), kSizes);
  }
  EXPECT_EQ(list_of(store->versions()), "6.0 5.0 1.0");
  EXPECT_TRUE(store->pinned_here(store->versions().back().index));
  ASSERT_TRUE(is_ok(store->pin(1, false)));
  ASSERT_TRUE(is_ok(save(store.get(), State::of(7, kSizes), 1)));
  EXPECT_EQ(list_of(store->versions()), "7.0 6.0");
  EXPECT_TRUE(fails(store->pin(1, true), Code::kNotFound));
  EXPECT_TRUE(fails(store->pin(1, false), Code::kNotFound));
}

TEST(Store, slots_that_are_all_pinned_are_busy_and_not_overwritten) {
  const auto store = heap_store(kSmall, kRoomy, 4);
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), 1)));
    ASSERT_TRUE(is_ok(store->pin(step, true)));
  }
  const uint64_t bytes = store->media().size();
  EXPECT_TRUE(fails(save(store.get(), State::of(4, kSizes), 1), Code::kBusy,
                    "of 4 slots 3 are taken: readers hold 0 versions, this process has pinned 3, "
                    "and the newest 1 are kept; 2 must be free"));
  EXPECT_EQ(store->media().size(), bytes) << "nor does it grow";
  EXPECT_EQ(list_of(store->versions()), "3.0 2.0 1.0");
  expect_all_whole(store.get(), kSizes);
  ASSERT_TRUE(is_ok(store->pin(2, false)));
  ASSERT_TRUE(is_ok(save(store.get(), State::of(4, kSizes), 1)));
  EXPECT_EQ(list_of(store->versions()), "4.0 3.0 1.0");
}

// One slot is left for that, however many are pinned.
TEST(Store, where_pins_fill_the_slots_one_may_go_back_to_an_older_version) {
  const auto store = heap_store(kSmall, kRoomy, 4);
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), 1)));
    ASSERT_TRUE(is_ok(store->pin(step, true)));
  }
  ASSERT_TRUE(is_ok(store->rebase(2)));
  EXPECT_EQ(list_of(store->versions()), "2.1 1.0");
}

}  // namespace
}  // namespace lightckpt
