// Crashes of a store. Goal: whatever instant the power goes, what was acknowledged is there byte
// for byte, the latest version is the one before or the one being made, nothing is listed that was
// never committed, and the store goes on from there. Method: a life of a small store is recorded as
// a trace of media events, in which begin, two workers and commit play different threads; at each
// fence, and wherever a call ends, images are built that a crash may leave (crash_sim.h), opened,
// and compared with what the calls so far have promised. Seeds are counted from 0, so a failure
// names its image.
//
// The test of the test: with any flush or fence taken out of the trace, some image must break a
// promise.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>

#include "crash_sim.h"
#include "store_helpers.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 64 * 1024;
constexpr uint32_t kSlots = 5;
#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kSeeds = 0;  // one thread has nothing to show it, and takes it minutes
#elif defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kSeeds = 16;
#else
constexpr uint64_t kSeeds = 64;
#endif
constexpr int kTrainer = 0, kWorker = 1, kOtherWorker = 2, kCommitter = 3;

// What holds at any crash from an event on, until the next promise. Versions go by their steps.
struct Promise {
  size_t from;                     // the number of events before it
  std::vector<uint64_t> listed;    // these are there
  std::vector<uint64_t> possible;  // and nothing but these
  std::set<uint64_t> latest;       // the newest of them is one of these; 0: there is none
};

// A life: the store does, the recorder sees, the model says what must hold.
class Life {
 public:
  Life(Granularity granularity, uint32_t keep, bool with_drops) : keep_(keep) {
    auto owned = std::make_unique<HeapMedia>(kBytes, kBytes, granularity);
    Media* media = owned.get();
    StoreOptions options;
    options.slots = kSlots;
    EXPECT_TRUE(is_ok(Store::open(std::move(owned), options, true, &store_)));
    formatted_ = Buffer(all_of(store_.get()).begin(), all_of(store_.get()).end());
    media->set_trace(&recorder_);
    // On pages whole units, so that no two ranges of a drain share a page and each is needed.
    const bool on_pages = granularity == Granularity::kPage;
    const std::vector<uint64_t> sizes =
        on_pages ? std::vector<uint64_t>{1536, 512, 256} : std::vector<uint64_t>{1400, 0, 300, 20};
    const std::vector<uint64_t> other =
        on_pages ? std::vector<uint64_t>{512, 1024} : std::vector<uint64_t>{500, 1300};
    // So many that the rebased version's old slot is not the next to be written: else its retiring
    // would need no drain of its own.
    for (uint64_t step = 1; step <= 1 + 2 * keep; ++step) save(State::of(step, sizes));
    if (with_drops) drop(State::of(8, sizes));
    for (uint64_t step = 9; step <= 10; ++step) save(State::of(step, sizes));
    rebase(listed_[1]);
    for (uint64_t step = 11; step <= 13 + keep; ++step) save(State::of(step, sizes));
    save(State::of(20, other));
    if (with_drops) drop(State::of(21, sizes));
    for (uint64_t step = 22; step <= 23 + keep; ++step) save(State::of(step, other));
    media->set_trace(nullptr);
  }

  const Buffer& formatted() const { return formatted_; }
  const std::vector<TraceEvent>& events() const { return recorder_.events(); }
  const std::vector<Promise>& promises() const { return promises_; }
  const State& state(uint64_t step) const { return states_.at(step); }
  uint32_t keep() const { return keep_; }

 private:
  uint64_t latest() const { return listed_.empty() ? 0 : listed_.front(); }

  void promise(std::vector<uint64_t> listed, std::vector<uint64_t> possible,
               std::set<uint64_t> latest_steps) {
    promises_.push_back({recorder_.events().size(), std::move(listed), std::move(possible),
                         std::move(latest_steps)});
  }

  Attempt start(const State& state) {
    states_[state.step] = state;
    std::vector<uint64_t> kept = listed_;
    if (kept.size() > keep_) kept.resize(keep_);
    promise(kept, listed_, {latest()});
    recorder_.play(kTrainer);
    Attempt attempt;
    EXPECT_TRUE(is_ok(begin(store_.get(), state, keep_, &attempt)));
    listed_ = std::move(kept);
    promise(listed_, listed_, {latest()});
    return attempt;
  }

  // Extents by turns from two workers, each of which fences its own.
  std::vector<uint32_t> write(const Attempt& attempt, const State& state) {
    std::vector<uint32_t> table;
    for (size_t i = 0; i < state.extents.size(); ++i) {
      if (state.extents[i].empty()) continue;
      recorder_.play(i % 2 == 0 ? kWorker : kOtherWorker);
      table.push_back(store_->media().nt_copy_crc(
          attempt.slot.record_offset + attempt.layout->extent_offsets[i], state.extents[i]));
    }
    for (int worker : {kWorker, kOtherWorker}) {
      recorder_.play(worker);
      store_->media().fence();
    }
    return table;
  }

  void save(const State& state) {
    const Attempt attempt = start(state);
    const std::vector<uint32_t> table = write(attempt, state);
    std::vector<uint64_t> with_new = listed_;
    with_new.insert(with_new.begin(), state.step);
    promise(listed_, with_new, {latest(), state.step});
    recorder_.play(kCommitter);
    EXPECT_TRUE(is_ok(store_->commit(attempt, table, state.host)));
    listed_ = std::move(with_new);
    promise(listed_, listed_, {state.step});
  }

  void drop(const State& state) { write(start(state), state); }

  void rebase(uint64_t step) {
    const auto chosen = std::ranges::find(listed_, step);
    const std::vector<uint64_t> older(chosen, listed_.end());
    promise(older, listed_, {latest(), step});
    recorder_.play(kTrainer);
    uint64_t number = 0;
    for (const Version& version : store_->versions()) {
      if (version.slot.step == step) number = version.slot.version;
    }
    EXPECT_TRUE(is_ok(store_->rebase(number)));
    listed_ = older;
    promise(listed_, listed_, {step});
  }

  uint32_t keep_;
  std::unique_ptr<Store> store_;
  Recorder recorder_;
  Buffer formatted_;
  std::vector<Promise> promises_;
  std::map<uint64_t, State> states_;
  std::vector<uint64_t> listed_;  // steps, newest first
};

// What is wrong with an image, or nothing.
std::string broken_promise(const Life& life, const Promise& promise, const Buffer& image) {
  std::unique_ptr<Store> store;
  if (const Status status = open_bytes(image, &store); !status.ok()) return status.message();
  const std::vector<Version> versions = store->versions();
  for (const Version& version : versions) {
    const uint64_t step = version.slot.step;
    if (std::ranges::find(promise.possible, step) == promise.possible.end()) {
      return "step " + std::to_string(step) + " is listed";
    }
    if (const auto whole = holds(store.get(), version, life.state(step)); !whole) {
      return whole.message();
    }
  }
  for (uint64_t step : promise.listed) {
    const auto is_it = [step](const Version& version) { return version.slot.step == step; };
    if (std::ranges::none_of(versions, is_it)) return "step " + std::to_string(step) + " is lost";
  }
  const uint64_t latest = versions.empty() ? 0 : versions.front().slot.step;
  if (!promise.latest.contains(latest)) return "the latest is step " + std::to_string(latest);
  if (!std::ranges::equal(all_of(store.get()), image)) return "opening it changed it";
  return "";
}

// The store goes on from an image: two versions more, and the latest before them is kept till then.
std::string broken_future(const Life& life, const Buffer& image) {
  std::unique_ptr<Store> store;
  if (const Status status = open_bytes(image, &store); !status.ok()) return status.message();
  const std::vector<Version> before = store->versions();
  for (uint64_t step : {100, 101}) {
    const State state = State::of(step, {1400, 0, 300, 20});
    if (const Status status = save(store.get(), state, life.keep()); !status.ok()) {
      return status.message();
    }
    const auto whole = holds(store.get(), store->versions().front(), state);
    if (!whole) return whole.message();
    if (step != 100 || before.empty()) continue;
    const auto kept = holds(store.get(), store->versions()[1], life.state(before[0].slot.step));
    if (!kept) return kept.message();
  }
  return "";
}

// The promises that hold if the power goes when `events` events have happened.
std::vector<Promise> promises_at(const Life& life, size_t events) {
  std::vector<Promise> found;
  for (const Promise& promise : life.promises()) {
    if (promise.from > events) break;
    if (promise.from < events) found.clear();
    found.push_back(promise);
  }
  return found;
}

// Crashes at every fence, sync and end of a call, `seeds` times each; the first promise broken.
// `left_out` is an event that does not happen.
std::string first_broken(const Life& life, Granularity granularity, uint64_t seeds,
                         std::optional<size_t> left_out = std::nullopt) {
  CrashSim sim(life.formatted(), granularity);
  for (size_t at = 0; at <= life.events().size(); ++at) {
    const bool ends = at == life.events().size();
    const bool waits = !ends && (life.events()[at].kind == MediaEvent::Kind::kFence ||
                                 life.events()[at].kind == MediaEvent::Kind::kSync);
    const std::vector<Promise> promises = promises_at(life, at);
    const bool call_ends = !promises.empty() && promises.back().from == at;
    // Nothing differs from the whole trace before what was left out.
    for (uint64_t seed = 0; seed < seeds && (waits || call_ends || ends); ++seed) {
      if (left_out && at <= *left_out) break;
      const Buffer image = sim.image(seed);
      const auto where = [&](const std::string& what) {
        return "crash at event " + std::to_string(at) + ", seed " + std::to_string(seed) + ": " +
               what;
      };
      for (const Promise& promise : promises) {
        const std::string broken = broken_promise(life, promise, image);
        if (!broken.empty()) return where(broken);
      }
      if (seed % 8 == 0 && !left_out) {
        const std::string broken = broken_future(life, image);
        if (!broken.empty()) return where("going on: " + broken);
      }
    }
    if (!ends && at != left_out) sim.apply(life.events()[at]);
  }
  return "";
}

struct Crashes : testing::TestWithParam<std::pair<Granularity, uint32_t>> {
  void SetUp() override {
    if (kSeeds == 0) GTEST_SKIP() << "not under the thread sanitizer";
  }

  Granularity granularity = GetParam().first;
  uint32_t keep = GetParam().second;
};

std::string name_of(Granularity granularity) {
  switch (granularity) {
    case Granularity::kByte:
      return "byte";
    case Granularity::kCacheLine:
      return "line";
    default:
      return "page";
  }
}

using Parameters = std::pair<Granularity, uint32_t>;

std::string name_of_parameters(const testing::TestParamInfo<Parameters>& tested) {
  return name_of(tested.param.first) + "_keep_" + std::to_string(tested.param.second);
}

INSTANTIATE_TEST_SUITE_P(Store, Crashes,
                         testing::Values(Parameters(Granularity::kByte, 1),
                                         Parameters(Granularity::kCacheLine, 1),
                                         Parameters(Granularity::kCacheLine, 2),
                                         Parameters(Granularity::kPage, 1),
                                         Parameters(Granularity::kPage, 2)),
                         name_of_parameters);

TEST_P(Crashes, at_any_instant_every_promise_holds) {
  const Life life(granularity, keep, true);
  EXPECT_EQ(first_broken(life, granularity, kSeeds), "");
}

// Not at byte granularity, where a flush does nothing and most fences have nothing to order.
using Barriers = Crashes;

INSTANTIATE_TEST_SUITE_P(Store, Barriers,
                         testing::Values(Parameters(Granularity::kCacheLine, 1),
                                         Parameters(Granularity::kCacheLine, 2),
                                         Parameters(Granularity::kPage, 1),
                                         Parameters(Granularity::kPage, 2)),
                         name_of_parameters);

TEST_P(Barriers, each_is_missed_if_it_is_taken_out) {
  const Life life(granularity, keep, false);
  const bool on_pages = granularity == Granularity::kPage;
  int barriers = 0;
  for (size_t at = 0; at < life.events().size(); ++at) {
    const TraceEvent& event = life.events()[at];
    const bool flushes = event.kind == MediaEvent::Kind::kFlush && event.bytes > 0;
    const bool is_barrier = on_pages ? event.kind == MediaEvent::Kind::kSync
                                     : flushes || event.kind == MediaEvent::Kind::kFence;
    if (!is_barrier) continue;
    ++barriers;
    EXPECT_NE(first_broken(life, granularity, kSeeds, at), "")
        << "no image misses event " << at << ", kind " << static_cast<int>(event.kind) << " of "
        << event.offset << "+" << event.bytes << " by thread " << event.actor;
  }
  EXPECT_GT(barriers, 30);
}

}  // namespace
}  // namespace lightckpt
