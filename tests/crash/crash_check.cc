// Crash states, enumerated. Goal: whatever instant the power goes, every acknowledged step that
// keep promises is there byte for byte, nothing is listed that was never committed, and the store
// goes on. Method: lives of a small store under a real engine are recorded as traces of media
// events (life.h); every image that hardware of three kinds may leave of them (hardware.h) is built
// (checker.h) and recovered (recovery.h). All of it for slots as lines of the media, and for slots
// and manifests in a catalog whose changes are transactions (atomic_catalog.h).
//
//   crashes    each scenario, crashed everywhere
//   restarts   killed before each event and within each write, started again, saved twice, crashed
//   seconds    crashed, started again on what is left, saved twice, and crashed once more
//   mutations  each barrier left out, one at a time: some image must break a promise (mutations.h).
//              Not in the order model, where durability needs no barrier.
//
//   crash_check [--seed N] [--images N] [--only SCENARIO]
//
// A run follows from its seed, which a failure names; --images bounds what is built at one point.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "checker.h"
#include "mutations.h"
#include "scenarios.h"

namespace lightckpt {
namespace {

constexpr uint64_t kFutureEvery = 4;
constexpr uint64_t kSecondsMax = 48;  // crashed images per scenario that are crashed again
constexpr uint64_t kRestartStep = 100;
constexpr uint64_t kHeap = heap_offset(kLifeSlots);

struct Arguments {
  uint64_t seed = 1;
  uint64_t images = 2048;
  std::string only;
};

class CrashCheck {
 public:
  explicit CrashCheck(const Arguments& arguments) : arguments_(arguments) {}

  void run() {
    for (Model model : {Model::kLine, Model::kOrder, Model::kPage}) {
      for (const Scenario& scenario : scenarios()) {
        if (scenario.dma && model == Model::kPage) continue;  // no device writes a plain file
        const std::string name = std::string(name_of(model)) + " " + scenario.name;
        if (name.find(arguments_.only) == std::string::npos) continue;
        name_ = name;
        scenario_ = scenario.name;
        ++scenarios_;
        const History history = history_of(scenario, model);
        crashes_and_seconds(history);
        restarts(history);
        if (model != Model::kOrder) mutations(history);
      }
    }
  }

  int report(double seconds) {
    for (size_t i = 0; i < barriers_not_needed().size(); ++i) {
      const NotNeeded& row = barriers_not_needed()[i];
      const uint64_t times = listed_[i];
      if (times == 0 && !arguments_.only.empty()) continue;
      // A table of reasons that hold for nothing hides what they once excused.
      failures_ += times == 0 ? 1 : 0;
      std::printf("not needed: %" PRIu64 " x %s %s%s%s: %s\n", times, name_of(row.model),
                  row.scenario.c_str(), row.scenario.empty() ? "" : ": ", row.site.c_str(),
                  row.reason.c_str());
    }
    std::printf("scenarios: %" PRIu64 ", restarts after a kill: %" PRIu64
                ", second crashes: %" PRIu64 "\n",
                scenarios_, restarts_, seconds_);
    std::printf("images: %" PRIu64 " checked in %.1f s, %.0f a second\n", images_, seconds,
                double(images_) / seconds);
    std::printf("mutations: %" PRIu64 " of %" PRIu64 " caught, %" PRIu64
                " listed as not needed; %" PRIu64 " more barriers had nothing to wait for\n",
                caught_, mutations_, mutations_ - caught_ - uncaught_, idle_);
    std::printf("seed %" PRIu64 ": %" PRIu64 " failures\n", arguments_.seed, failures_);
    return failures_ == 0 ? 0 : 1;
  }

 private:
  Settings settings(uint64_t share) const {
    Settings settings;
    settings.seed = arguments_.seed;
    settings.images_max = std::max<uint64_t>(arguments_.images / share, 2);
    return settings;
  }

  void fail(const std::string& what) {
    ++failures_;
    std::printf("FAILED %s: %s\n  replay: crash_check --seed %" PRIu64 " --images %" PRIu64
                " --only '%s'\n",
                name_.c_str(), what.c_str(), arguments_.seed, arguments_.images, name_.c_str());
  }

  void check(const History& history, const Settings& settings, const std::string& where) {
    const std::string what = Checker::first_broken(history, settings, &images_);
    if (!what.empty()) fail(where + what);
  }

  // Two more versions, by a process that finds what the history has left.
  static void go_on(History* history) {
    Life life(history);
    life.save(kRestartStep, sizes_for(history->model));
    life.save(kRestartStep + 1, sizes_for(history->model));
  }

  void crashes_and_seconds(const History& history) {
    Settings all = settings(1);
    all.future_every = kFutureEvery;
    // Which images are crashed again: as many as are wanted, each as likely as any other.
    std::vector<std::pair<size_t, Buffer>> chosen;
    std::mt19937_64 random(arguments_.seed);
    uint64_t seen = 0;
    const auto see = [&](size_t at, const std::byte* memory, uint64_t bytes) {
      const uint64_t place = chosen.size() < kSecondsMax ? chosen.size() : random() % (seen + 1);
      ++seen;
      if (place >= kSecondsMax) return;
      if (place == chosen.size()) chosen.emplace_back();
      chosen[place] = {at, Buffer(memory, memory + bytes)};
    };
    const std::string what = Checker::first_broken(history, all, &images_, see);
    if (!what.empty()) return fail(what);
    for (auto& [at, image] : chosen) {
      History again = history.crashed(std::move(image));
      go_on(&again);
      ++seconds_;
      check(again, settings(32), "crashed at event " + std::to_string(at) + ", and again: ");
    }
  }

  void restarts(const History& history) {
    std::mt19937_64 random(arguments_.seed);
    for (size_t at = 0; at <= history.events.size(); ++at) {
      const bool ends = at == history.events.size();
      // Where all is in one order, a kill is a crash; only torn slots are worth another look.
      const bool tears = !ends && history.events[at].tears();
      const bool of_slot = tears && history.events[at].offset < kHeap;
      if (history.model == Model::kOrder && !of_slot) continue;
      const uint64_t words = tears ? history.events[at].data.size() / 8 : 0;
      for (uint64_t torn : {uint64_t{0}, words < 2 ? 0 : 8 + random() % (words - 1) * 8}) {
        History killed = history.killed_at(at, torn);
        go_on(&killed);
        ++restarts_;
        Settings some = settings(64);
        some.from = at;
        check(killed, some,
              "killed at event " + std::to_string(at) + " + " + std::to_string(torn) +
                  ", and then: ");
        if (words < 2) break;
      }
    }
    // A restart's own barriers: after a kill between a slot's store and its flush.
    if (history.model == Model::kOrder || scenario_ != "steady state") return;
    size_t at = history.events.size();
    while (history.events[at - 1].site != "commit: store of slot") --at;
    History killed = history.killed_at(at, 0);
    go_on(&killed);
    mutations(killed);
  }

  void mutations(const History& history) {
    const Mutations all(history);
    idle_ += all.idle();
    for (size_t i = 0; i < all.count(); ++i) {
      const Mutation mutation = all.at(i);
      ++mutations_;
      Settings some = settings(4);
      some.from = mutation.first;
      if (!Checker::first_broken(mutation.history, some, &images_).empty()) {
        ++caught_;
      } else if (!is_listed(history.model, mutation.site)) {
        ++uncaught_;
        fail("no image misses event " + std::to_string(mutation.first) + ", " + mutation.site);
      }
    }
  }

  bool is_listed(Model model, const std::string& site) {
    for (size_t i = 0; i < barriers_not_needed().size(); ++i) {
      const NotNeeded& row = barriers_not_needed()[i];
      const bool here = row.scenario.empty() || row.scenario == scenario_;
      if (row.model != model || row.site != site || !here) continue;
      ++listed_[i];
      return true;
    }
    return false;
  }

  const Arguments arguments_;
  std::string name_;  // of the model and the scenario
  std::string scenario_;
  uint64_t scenarios_ = 0, restarts_ = 0, seconds_ = 0, images_ = 0, failures_ = 0;
  uint64_t mutations_ = 0, caught_ = 0, uncaught_ = 0, idle_ = 0;
  std::map<size_t, uint64_t> listed_;  // by row of the table
};

// Each as two words or as one with "=".
bool parse(int argc, char** argv, Arguments* arguments) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const size_t equals = std::min(word.find('='), word.size());
    const std::string name = word.substr(0, equals);
    if (equals == word.size() && ++i == argc) return false;
    const std::string value = equals < word.size() ? word.substr(equals + 1) : argv[i];
    char* end = nullptr;
    if (name == "--only") {
      arguments->only = value;
    } else if (name == "--seed") {
      arguments->seed = std::strtoull(value.c_str(), &end, 10);
    } else if (name == "--images") {
      arguments->images = std::strtoull(value.c_str(), &end, 10);
    } else {
      return false;
    }
    if (end != nullptr && (*end != 0 || value.empty())) return false;
  }
  return true;
}

}  // namespace
}  // namespace lightckpt

int main(int argc, char** argv) {
  lightckpt::Arguments arguments;
  if (!lightckpt::parse(argc, argv, &arguments)) {
    std::fprintf(stderr, "usage: %s [--seed N] [--images N] [--only SCENARIO]\n", argv[0]);
    return 2;
  }
  const uint64_t begin = lightckpt::now_ns();
  lightckpt::CrashCheck check(arguments);
  check.run();
  return check.report(double(lightckpt::now_ns() - begin) * 1e-9);
}
