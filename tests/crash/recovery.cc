// See recovery.h.
#include "recovery.h"

#include <algorithm>
#include <tuple>

#include "crc32c.h"

namespace lightckpt {
namespace {

constexpr uint64_t kNextStep = 1'000'000;

// Keeps what was where something is about to be written, and in the end puts it back.
class UndoLog final : public MediaTrace {
 public:
  explicit UndoLog(std::byte* memory) : memory_(memory) {}
  UndoLog(const UndoLog&) = delete;
  UndoLog& operator=(const UndoLog&) = delete;
  ~UndoLog() override {
    for (; !log_.empty(); log_.pop_back()) {
      const auto& [offset, old] = log_.back();
      std::memcpy(memory_ + offset, old.data(), old.size());
    }
  }

  void on_event(const MediaEvent& event) override {
    if (event.data == nullptr) return;
    const std::byte* old = memory_ + event.offset;
    log_.emplace_back(event.offset, Buffer(old, old + event.bytes));
  }
  uint64_t writes() const { return log_.size(); }

 private:
  std::byte* memory_;
  std::vector<std::pair<uint64_t, Buffer>> log_;
};

std::string step_of(const Version& version) {
  return "version " + std::to_string(version.slot.version) + " (step " +
         std::to_string(version.slot.step) + ")";
}

bool same(const Version& a, const Version& b) {
  return std::memcmp(&a.slot, &b.slot, sizeof(Slot)) == 0 && a.index == b.index &&
         a.damage.code() == b.damage.code();
}

}  // namespace

Known Known::of(State state) {
  Known known = {std::move(state), {}};
  for (const Buffer& extent : known.state.extents) {
    CHECK(extent.size() <= kChunkBytes);
    if (!extent.empty()) known.table.push_back(crc32c(0, extent.data(), extent.size()));
  }
  return known;
}

Recovery::Recovery(const Knowns& knowns, uint32_t keep, CatalogKind catalog)
    : knowns_(knowns),
      keep_(keep),
      catalog_(catalog),
      next_(Known::of(State::of(kNextStep, knowns.begin()->second.state.sizes()))) {}

Status Recovery::open(MediaTrace* trace, std::unique_ptr<Store>* store) {
  auto media =
      std::make_unique<BorrowedMedia>(memory(), bytes_, kStoreBytesMax, Granularity::kVolatile);
  media->set_trace(trace);
  auto slots = catalog_of(
      catalog_, memory(), kLifeSlots, [trace](const std::string&, uint64_t offset, Bytes pages) {
        trace->on_event({MediaEvent::Kind::kStore, offset, pages.size(), pages.data()});
      });
  return Store::open(std::move(media), {}, false, store, std::move(slots));
}

uint64_t Recovery::orphans() const {
  return catalog_ == CatalogKind::kLines ? 0 : AtomicCatalog::orphans(memory_.get(), kLifeSlots);
}

// The version is, down to the last byte, this state.
std::string Recovery::wrong(Store* store, const Version& version, const Known& known) const {
  const State& state = known.state;
  if (!version.damage.ok()) return version.damage.message();
  if (version.slot.step != state.step) return " is not of step " + std::to_string(state.step);
  if (version.layout->extent_bytes != state.sizes()) return " has other extents";
  if (!std::ranges::equal(version.blob, state.blob)) return " has another blob";
  const uint32_t* table = nullptr;
  Bytes host;
  const Status status = decode_record(store->media(), version.slot, *version.layout, &table, &host);
  if (!status.ok()) return " has a bad record: " + status.message();
  if (!std::ranges::equal(host, state.host)) return " has another host state";
  if (!std::equal(known.table.begin(), known.table.end(), table)) return " has other checksums";
  for (size_t i = 0; i < state.extents.size(); ++i) {
    const uint64_t offset = version.slot.record_offset + version.layout->extent_offsets[i];
    const Buffer& extent = state.extents[i];
    if (!extent.empty() &&
        std::memcmp(extent.data(), store->media().view() + offset, extent.size()) != 0) {
      return " has other bytes in extent " + std::to_string(i);
    }
  }
  return "";
}

std::string Recovery::wrong_list(Store* store, const List& versions, const Promise& promise) const {
  for (const Version& version : versions) {
    const uint64_t step = version.slot.step;
    if (std::ranges::find(promise.possible, step) == promise.possible.end()) {
      return step_of(version) + " is listed";
    }
    const std::string what = wrong(store, version, knowns_.at(step));
    if (!what.empty()) return step_of(version) + what;
  }
  for (uint64_t step : promise.listed) {
    const auto is_it = [step](const Version& version) { return version.slot.step == step; };
    if (std::ranges::none_of(versions, is_it)) return "step " + std::to_string(step) + " is lost";
  }
  const uint64_t latest = versions.empty() ? 0 : versions.front().slot.step;
  if (!promise.latest.contains(latest)) return "the latest is step " + std::to_string(latest);
  return "";
}

// What versions reach lies in the heap, apart from each other but for a manifest that versions of
// one structure may share, and the rest is free. Where a catalog keeps the manifests, it keeps none
// that no slot names.
std::string Recovery::wrong_space(Store* store, const List& versions) const {
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const Version& version : versions) {
    const Slot& slot = version.slot;
    const std::pair manifest(slot.manifest_offset, slot.manifest_offset + slot.manifest_bytes);
    const bool here = catalog_ == CatalogKind::kLines;
    if (here && std::ranges::find(ranges, manifest) == ranges.end()) ranges.push_back(manifest);
    ranges.emplace_back(slot.record_offset, slot.record_offset + version.layout->area_bytes);
  }
  std::ranges::sort(ranges);
  const uint64_t heap = heap_offset(store->header().slot_count);
  uint64_t end = heap, reached = 0;
  for (const auto& [from, to] : ranges) {
    if (from < end) return "two versions reach byte " + std::to_string(from);
    reached += to - from;
    end = to;
  }
  if (end > bytes_) return "a version reaches byte " + std::to_string(end);
  if (orphans() > 0) return "the catalog holds a manifest that no slot names";
  const uint64_t free = store->free_bytes();
  if (reached + free == bytes_ - heap) return "";
  return std::to_string(reached) + " bytes reached and " + std::to_string(free) +
         " free are not the heap's " + std::to_string(bytes_ - heap);
}

std::string Recovery::broken(const Promise& promise) {
  UndoLog log(memory());
  // Recovery frees, in one change, what nothing names; else it only reads.
  const uint64_t writes = orphans() > 0 ? 1 : 0;
  std::unique_ptr<Store> store;
  if (const Status status = open(&log, &store); !status.ok()) return status.message();
  const List versions = store->versions();
  if (std::string what = wrong_list(store.get(), versions, promise); !what.empty()) return what;
  if (std::string what = wrong_space(store.get(), versions); !what.empty()) return what;
  if (const Status status = open(&log, &store); !status.ok()) return status.message();
  const List again = store->versions();
  if (!std::ranges::equal(versions, again, same)) return "the second recovery finds other versions";
  if (log.writes() != writes) return "recovery writes";
  return "";
}

std::string Recovery::broken_future() {
  UndoLog log(memory());
  const uint64_t bytes = bytes_;
  const auto go_on = [&]() -> std::string {
    std::unique_ptr<Store> store;
    if (const Status status = open(&log, &store); !status.ok()) return status.message();
    List before = store->versions();
    if (const Status status = save(store.get(), next_.state, keep_); !status.ok()) {
      return status.message();
    }
    bytes_ = store->media().size();
    if (const Status status = open(&log, &store); !status.ok()) return status.message();
    const List after = store->versions();
    // Behind a rebase that a crash broke off stand the versions that it gave up.
    uint64_t oldest = UINT64_MAX;
    std::erase_if(before, [&](const Version& version) {
      const bool given_up = version.slot.version >= oldest;
      if (!given_up) oldest = version.slot.version;
      return given_up;
    });
    before.resize(std::min<size_t>(before.size(), keep_));
    if (after.size() != before.size() + 1) {
      return std::to_string(after.size()) + " versions are listed";
    }
    if (std::string what = wrong(store.get(), after[0], next_); !what.empty()) {
      return step_of(after[0]) + what;
    }
    for (size_t i = 0; i < before.size(); ++i) {
      const Known& known = knowns_.at(before[i].slot.step);
      if (std::string what = wrong(store.get(), after[i + 1], known); !what.empty()) {
        return step_of(after[i + 1]) + what;
      }
    }
    return wrong_space(store.get(), after);
  };
  std::string what = go_on();
  bytes_ = bytes;
  return what.empty() ? what : "going on: " + what;
}

}  // namespace lightckpt
