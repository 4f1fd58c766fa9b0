// A store on a file system that is full for a while. Goal: it costs the versions of that while and
// nothing else: what was acknowledged stays, in view and after a power cut at any call; what failed
// is never taken for whole by halves; and with room again the next version is made, and all of them
// load. Method: each store and each sync of a save or a rebase fails in turn, and one more of those
// that follow, the repair's own included; for each way that the kernel may deal with such pages.
#include <gtest/gtest.h>

#include "full_media.h"
#include "store_helpers.h"

namespace lightckpt {
namespace {

using After = FullMedia::After;

const std::vector<uint64_t> kSizes = {5000, 0, 300};
const std::vector<uint64_t> kOther = {7000, 20};
constexpr uint64_t kBytes = 512 * 1024;
constexpr uint64_t kNone = UINT64_MAX;
constexpr uint32_t kKeep = 2;

struct Kind {
  Granularity granularity;
  After after;
};
constexpr Kind kKinds[] = {{Granularity::kVolatile, After::kKept},
                           {Granularity::kPage, After::kWritten},
                           {Granularity::kPage, After::kKept},
                           {Granularity::kPage, After::kReadAgain}};

// A store with three saves behind it, of which two versions and one that waits to be retired stand.
class FullStore {
 public:
  explicit FullStore(const Kind& kind) {
    auto owned = std::make_unique<FullMedia>(kBytes, kind.granularity, kind.after);
    media = owned.get();
    EXPECT_TRUE(is_ok(Store::open(std::move(owned), {}, true, &store)));
    for (uint64_t step = 1; step <= 3; ++step) {
      EXPECT_TRUE(is_ok(save(State::of(step, kSizes))));
    }
  }

  Status save(const State& state) {
    tried.push_back(state);
    const Status status = lightckpt::save(store.get(), state, kKeep);
    if (status.ok()) acknowledged.push_back(state.step);
    return status;
  }

  // Every version of these bytes is whole and was tried; the newest that was acknowledged is there.
  testing::AssertionResult is_sound(const Buffer& bytes) const {
    std::unique_ptr<Store> found;
    if (auto opened = is_ok(open_bytes(bytes, &found)); !opened) return opened;
    bool has_newest = false;
    for (const Version& version : found->versions()) {
      const auto state = std::ranges::find(tried, version.slot.step, &State::step);
      if (state == tried.end()) return testing::AssertionFailure() << "a version of no step";
      if (auto whole = holds(found.get(), version, *state); !whole) return whole;
      has_newest |= version.slot.step == acknowledged.back();
    }
    if (has_newest) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "step " << acknowledged.back() << " is not there, only "
                                       << list_of(found->versions());
  }

  FullMedia* media;
  std::unique_ptr<Store> store;
  std::vector<State> tried;
  std::vector<uint64_t> acknowledged;
};

// Runs `change` on stores of this kind with each event failing, and one after it, until it
// succeeds.
void fail_at_each(const Kind& kind, const std::function<Status(FullStore&)>& change) {
  FullStore counting(kind);
  const uint64_t begin = counting.media->events();
  ASSERT_TRUE(is_ok(change(counting)));
  const uint64_t count = counting.media->events() - begin;
  ASSERT_GE(count, 2u);
  for (uint64_t first = 0; first < count; ++first) {
    for (uint64_t second : {kNone, uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{7}, uint64_t{15},
                            uint64_t{16}, uint64_t{17}, uint64_t{18}, uint64_t{20}, uint64_t{23}}) {
      SCOPED_TRACE("event " + std::to_string(first) + ", and " + std::to_string(second) +
                   " behind it");
      FullStore full(kind);
      full.media->fails_at = [&](uint64_t index) {
        return index == begin + first || (second != kNone && index == begin + first + 1 + second);
      };
      Status status = change(full);
      EXPECT_TRUE(fails(status, Code::kNoSpace, "no block"));
      for (int tries = 0; !status.ok() && tries < 4; ++tries) {
        ASSERT_TRUE(full.is_sound(full.media->durable()));
        ASSERT_TRUE(full.is_sound(full.media->seen_by_others()));
        status = change(full);
        ASSERT_TRUE(status.ok() || fails(status, Code::kNoSpace, "no block"));
      }
      ASSERT_TRUE(is_ok(status));
      full.media->fails_at = nullptr;
      ASSERT_TRUE(full.is_sound(full.media->durable()));
      for (uint64_t step = 1'000'000; step < 1'000'003; ++step) {
        ASSERT_TRUE(is_ok(full.save(State::of(step, kSizes))));
        ASSERT_TRUE(full.is_sound(full.media->durable()));
        EXPECT_EQ(full.store->versions().front().slot.step, step);
      }
      EXPECT_TRUE(std::ranges::equal(full.media->durable(), all_of(full.store.get()))) << "settled";
    }
  }
}

TEST(Full, any_store_or_sync_of_a_save_costs_that_version_only) {
  for (const Kind& kind : kKinds) {
    for (const auto& sizes : {kSizes, kOther}) {
      uint64_t step = 50;
      fail_at_each(kind, [&](FullStore& full) { return full.save(State::of(++step, sizes)); });
    }
  }
}

TEST(Full, any_store_or_sync_of_a_rebase_leaves_the_lineage_before_or_the_new_one) {
  for (const Kind& kind : kKinds) {
    fail_at_each(kind, [](FullStore& full) {
      // The newer one may go from here on, whether it is told so or not.
      full.acknowledged = {2};
      return full.store->rebase(2);
    });
  }
}

// The attempt in flight, whatever comes between.
TEST(Full, an_attempt_that_lost_a_page_is_never_committed_though_there_is_room_again) {
  for (const Kind& kind : kKinds) {
    FullStore full(kind);
    const State state = State::of(50, kSizes);
    Attempt attempt;
    ASSERT_TRUE(is_ok(begin(full.store.get(), state, kKeep, &attempt)));
    full.media->fails_at = [](uint64_t) { return true; };
    const auto table = write_extents(full.store.get(), attempt, state);
    full.media->fails_at = nullptr;
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(fails(full.store->commit(attempt, table, state.host), Code::kNoSpace));
    }
    EXPECT_TRUE(full.is_sound(full.media->durable()));
    EXPECT_TRUE(is_ok(full.save(State::of(51, kSizes))));
    EXPECT_TRUE(full.is_sound(full.media->durable()));
  }
}

// As a worker's early drain: it took ranges of the attempt, and nobody else will drain them.
TEST(Full, an_attempt_of_which_a_drain_failed_is_never_committed_though_there_is_room_again) {
  FullStore full({Granularity::kPage, After::kKept});
  const State state = State::of(50, kSizes);
  Attempt attempt;
  ASSERT_TRUE(is_ok(begin(full.store.get(), state, kKeep, &attempt)));
  const auto table = write_extents(full.store.get(), attempt, state);
  full.media->fails_at = [](uint64_t) { return true; };
  EXPECT_TRUE(fails(full.media->drain(), Code::kNoSpace));
  full.media->fails_at = nullptr;
  EXPECT_TRUE(fails(full.store->commit(attempt, table, state.host), Code::kNoSpace));
  EXPECT_TRUE(full.is_sound(full.media->durable()));
  EXPECT_TRUE(is_ok(full.save(State::of(51, kSizes))));
  EXPECT_TRUE(full.is_sound(full.media->durable()));
}

TEST(Full, nothing_is_begun_or_rebased_while_it_stays_full) {
  for (const Kind& kind : kKinds) {
    FullStore full(kind);
    full.media->fails_at = [](uint64_t) { return true; };
    for (uint64_t step = 50; step < 54; ++step) {
      EXPECT_TRUE(fails(full.save(State::of(step, kSizes)), Code::kNoSpace, "no block"));
      EXPECT_TRUE(fails(full.store->rebase(2), Code::kNoSpace, "no block"));
      EXPECT_TRUE(full.is_sound(full.media->durable()));
    }
    full.media->fails_at = nullptr;
    EXPECT_TRUE(is_ok(full.save(State::of(60, kSizes))));
    EXPECT_TRUE(full.is_sound(full.media->durable()));
  }
}

}  // namespace
}  // namespace lightckpt
