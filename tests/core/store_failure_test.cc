// A store whose media fails or is damaged. Goal: nothing is acknowledged that is not durable; after
// the first failed drain nothing is acknowledged at all; and damage costs the version that has it
// and no other. Method: a media whose n-th sync or check fails, for every n; bytes overwritten
// behind the store's back.
#include <gtest/gtest.h>

#include "store_helpers.h"
#include "test_media.h"

namespace lightckpt {
namespace {

const std::vector<uint64_t> kSizes = {5000, 0, 300};
const std::vector<uint64_t> kOther = {7000, 20};
constexpr uint64_t kBytes = 512 * 1024;

struct FailingStore {
  explicit FailingStore(uint32_t keep_versions = 1) : keep(keep_versions) {
    auto owned = std::make_unique<TestMedia>(kBytes, kBytes, Granularity::kPage);
    media = owned.get();
    EXPECT_TRUE(is_ok(Store::open(std::move(owned), {}, true, &store)));
    for (uint64_t step = 1; step <= keep + 1; ++step) {
      EXPECT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), keep)));
    }
  }

  // Counts what a save of `sizes` asks the media for, and fails the one with this index.
  void fail_sync(uint64_t index) {
    media->on_sync = [this, index](uint64_t, uint64_t) {
      return syncs++ == index ? Status(Code::kLost, "the disk is gone") : Status();
    };
  }
  void fail_check(uint64_t index) {
    media->on_check = [this, index] {
      return checks++ == index ? Status(Code::kLost, "the file was cut") : Status();
    };
  }

  uint32_t keep;
  TestMedia* media;
  std::unique_ptr<Store> store;
  uint64_t syncs = 0;
  uint64_t checks = 0;
};

// All that could make or retire a version is refused with the first failure.
void expect_final(Store* store, const std::string& why) {
  Attempt attempt;
  EXPECT_TRUE(fails(begin(store, State::of(90, kSizes), 1, &attempt), Code::kLost, why));
  EXPECT_TRUE(fails(store->commit(attempt, RecordFront(0), {}), Code::kLost, why));
  EXPECT_TRUE(fails(store->rebase(store->versions().back().slot.version), Code::kLost, why));
}

TEST(FailedDrain, any_of_a_save_is_final_and_the_versions_before_it_stand) {
  for (const auto& sizes : {kSizes, kOther}) {
    FailingStore counting(2);
    counting.fail_sync(UINT64_MAX);
    ASSERT_TRUE(is_ok(save(counting.store.get(), State::of(50, sizes), 2)));
    ASSERT_GE(counting.syncs, 3u) << "retired slot, contents, new slot";
    for (uint64_t index = 0; index < counting.syncs; ++index) {
      FailingStore failing(2);
      failing.fail_sync(index);
      const Status status = save(failing.store.get(), State::of(50, sizes), 2);
      EXPECT_TRUE(fails(status, Code::kLost, "the disk is gone")) << "sync " << index;
      EXPECT_EQ(failing.syncs, index + 1) << "nothing is drained after it";
      expect_final(failing.store.get(), "the disk is gone");
      EXPECT_EQ(failing.syncs, index + 1);
      // Whatever the drain left behind, those that were to be kept are there.
      const auto again = reopened(failing.store.get());
      Version found;
      for (uint64_t version : {2, 3}) {
        ASSERT_TRUE(is_ok(again->find(version, &found))) << "sync " << index;
        EXPECT_TRUE(holds(again.get(), found, State::of(version, kSizes)));
      }
    }
  }
}

TEST(FailedDrain, any_of_a_rebase_is_final) {
  FailingStore counting(2);
  counting.fail_sync(UINT64_MAX);
  ASSERT_TRUE(is_ok(counting.store->rebase(2)));
  for (uint64_t index = 0; index < counting.syncs; ++index) {
    FailingStore failing(2);
    failing.fail_sync(index);
    EXPECT_TRUE(fails(failing.store->rebase(2), Code::kLost, "the disk is gone"));
    expect_final(failing.store.get(), "the disk is gone");
    const auto again = reopened(failing.store.get());
    Version found;
    ASSERT_TRUE(is_ok(again->find(2, &found)));
    EXPECT_TRUE(holds(again.get(), found, State::of(2, kSizes)));
  }
}

TEST(FailedDrain, one_while_formatting_makes_no_store) {
  auto media = std::make_unique<TestMedia>(kBytes, kBytes, Granularity::kPage);
  media->on_sync = [](uint64_t, uint64_t) { return Status(Code::kLost, "the disk is gone"); };
  std::unique_ptr<Store> store;
  EXPECT_TRUE(fails(Store::open(std::move(media), {}, true, &store), Code::kLost));
  EXPECT_EQ(store, nullptr);
}

TEST(LostPages, any_check_of_a_commit_that_fails_is_final) {
  FailingStore counting;
  counting.fail_check(UINT64_MAX);
  ASSERT_TRUE(is_ok(save(counting.store.get(), State::of(50, kSizes), 1)));
  ASSERT_GE(counting.checks, 2u) << "before the drain, and behind it";
  for (uint64_t index = 0; index < counting.checks; ++index) {
    FailingStore failing;
    failing.fail_check(index);
    const Status status = save(failing.store.get(), State::of(50, kSizes), 1);
    EXPECT_TRUE(fails(status, Code::kLost, "the file was cut")) << "check " << index;
    expect_final(failing.store.get(), "the file was cut");
    EXPECT_TRUE(
        holds(failing.store.get(), failing.store->versions().front(), State::of(2, kSizes)));
  }
}

// Not the media: this call failed. A slot may have been written before it was known.
TEST(FailedCall, any_check_of_a_save_that_fails_costs_that_version_only) {
  FailingStore counting(2);
  counting.fail_check(UINT64_MAX);
  ASSERT_TRUE(is_ok(save(counting.store.get(), State::of(50, kSizes), 2)));
  for (uint64_t index = 0; index < counting.checks; ++index) {
    FailingStore failing(2);
    Store* const store = failing.store.get();
    failing.media->on_check = [&] {
      return failing.checks++ == index ? Status(Code::kIo, "no answer") : Status();
    };
    const auto expect_sound = [&] {
      const auto again = reopened(store);
      EXPECT_EQ(list_of(again->versions()), list_of(store->versions()));
      for (const Version& version : again->versions()) {
        EXPECT_TRUE(holds(again.get(), version, State::of(version.slot.step, kSizes)))
            << "check " << index;
      }
    };
    EXPECT_TRUE(fails(save(store, State::of(50, kSizes), 2), Code::kIo, "no answer"));
    ASSERT_TRUE(is_ok(store->rebase(2)));
    expect_sound();
    for (uint64_t step = 60; step < 64; ++step) {
      ASSERT_TRUE(is_ok(save(store, State::of(step, kSizes), 2)));
      expect_sound();
    }
  }
}

// A store to a page that is gone goes nowhere, and a drain of it fails not.
TEST(LostPages, those_lost_by_the_end_of_the_drain_are_found_before_the_slot_is_written) {
  FailingStore failing;
  const State state = State::of(50, kSizes);
  Attempt attempt;
  ASSERT_TRUE(is_ok(begin(failing.store.get(), state, 1, &attempt)));
  const auto table = write_extents(failing.store.get(), attempt, state);
  bool drained = false;
  failing.media->on_sync = [&](uint64_t, uint64_t) {
    drained = true;
    return Status();
  };
  failing.media->on_check = [&] {
    return drained ? Status(Code::kLost, "the file was cut") : Status();
  };
  EXPECT_TRUE(fails(failing.store->commit(attempt, table, state.host), Code::kLost, "was cut"));
  EXPECT_EQ(list_of(reopened(failing.store.get())->versions()), "2.0");
}

TEST(LostPages, a_media_that_lost_some_is_not_opened) {
  auto media = std::make_unique<TestMedia>(kBytes);
  media->on_check = [] { return Status(Code::kLost, "the file was cut"); };
  std::unique_ptr<Store> store;
  EXPECT_TRUE(fails(Store::open(std::move(media), {}, true, &store), Code::kLost, "the file was"));
}

struct Damaged : testing::Test {
  Damaged() {
    auto owned = std::make_unique<TestMedia>(kBytes);
    media = owned.get();
    EXPECT_TRUE(is_ok(Store::open(std::move(owned), {}, true, &store)));
    EXPECT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 2)));
    EXPECT_TRUE(is_ok(save(store.get(), State::of(2, kOther), 2)));
  }
  void flip(uint64_t offset) { media->memory()[offset] ^= std::byte{1}; }

  TestMedia* media;
  std::unique_ptr<Store> store;
};

TEST_F(Damaged, a_manifest_is_listed_as_damaged_and_the_older_version_stays) {
  flip(store->versions().front().slot.manifest_offset + 50);
  const auto again = reopened(store.get());
  ASSERT_EQ(list_of(again->versions()), "2.0! 1.0");
  Version found;
  EXPECT_TRUE(fails(again->find(2, &found), Code::kFormat, "version 2 (step 2): the checksum"));
  EXPECT_TRUE(fails(again->pin(2, true), Code::kFormat, "checksum"));
  EXPECT_TRUE(fails(again->rebase(2), Code::kNotFound));
  EXPECT_TRUE(holds(again.get(), again->versions().back(), State::of(1, kSizes)));
}

TEST_F(Damaged, a_version_with_a_bad_manifest_is_not_kept_and_the_whole_one_is) {
  flip(store->versions().front().slot.manifest_offset + 50);
  const auto again = reopened(store.get());
  ASSERT_TRUE(is_ok(save(again.get(), State::of(3, kSizes), 1)));
  const std::vector<Version> versions = again->versions();
  ASSERT_EQ(versions.size(), 2u) << list_of(versions);
  EXPECT_TRUE(holds(again.get(), versions[0], State::of(3, kSizes)));
  EXPECT_TRUE(holds(again.get(), versions[1], State::of(1, kSizes)));
}

TEST_F(Damaged, an_older_version_can_be_made_the_latest_past_a_bad_manifest) {
  flip(store->versions().front().slot.manifest_offset + 50);
  const auto again = reopened(store.get());
  ASSERT_TRUE(is_ok(again->rebase(1)));
  EXPECT_EQ(list_of(again->versions()), "1.1");
  EXPECT_TRUE(holds(again.get(), again->versions().front(), State::of(1, kSizes)));
}

TEST_F(Damaged, a_slot_is_not_listed_and_its_version_before_is_the_latest) {
  flip(slot_offset(store->versions().front().index) + 20);
  const auto again = reopened(store.get());
  EXPECT_EQ(list_of(again->versions()), "1.0");
  EXPECT_TRUE(holds(again.get(), again->versions().front(), State::of(1, kSizes)));
}

TEST_F(Damaged, slots_of_a_store_that_lay_here_before_are_not_listed) {
  const Buffer before = media->bytes();
  auto fresh = std::make_unique<TestMedia>(kBytes);
  std::ranges::copy(before, fresh->memory());
  std::unique_ptr<Store> formatted;
  ASSERT_TRUE(is_ok(Store::open(std::move(fresh), {}, true, &formatted)));
  EXPECT_EQ(list_of(formatted->versions()), "");
}

TEST_F(Damaged, a_store_opened_for_reading_only_cannot_be_changed) {
  StoreOptions options;
  options.read_only = true;
  auto copy = std::make_unique<TestMedia>(kBytes);
  std::ranges::copy(media->bytes(), copy->memory());
  std::unique_ptr<Store> reader;
  ASSERT_TRUE(is_ok(Store::open(std::move(copy), options, false, &reader)));
  Attempt attempt;
  EXPECT_TRUE(fails(begin(reader.get(), State::of(3, kSizes), 1, &attempt), Code::kAccess));
  EXPECT_TRUE(fails(reader->rebase(1), Code::kAccess));
  EXPECT_EQ(list_of(reader->versions()), "2.0 1.0");
}

// The check at the end of a reader's look is the last that happens before it takes the lock.
TEST_F(Damaged, a_version_that_is_retired_between_the_look_and_the_lock_is_not_pinned) {
  const Version latest = store->versions().front();
  Slot newer = latest.slot;
  newer.version = 3;
  for (const Slot& instead : {Slot{}, encode_slot(newer)}) {
    StoreOptions options;
    options.read_only = true;
    auto owned = std::make_unique<TestMedia>(kBytes);
    TestMedia* seen = owned.get();
    std::ranges::copy_n(media->memory(), kPageBytes, seen->memory());  // the header, no slot yet
    std::unique_ptr<Store> reader;
    ASSERT_TRUE(is_ok(Store::open(std::move(owned), options, false, &reader)));
    std::ranges::copy(media->bytes(), seen->memory());
    seen->on_check = [&] {
      std::memcpy(seen->memory() + slot_offset(latest.index), &instead, sizeof(instead));
      return Status();
    };
    EXPECT_TRUE(fails(reader->pin(2, true), Code::kNotFound, "retired just now"));
    EXPECT_FALSE(reader->pinned_here(latest.index));
    EXPECT_TRUE(is_ok(reader->pin(1, true)));
  }
}

}  // namespace
}  // namespace lightckpt
