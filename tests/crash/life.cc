// See life.h.
#include "life.h"

#include <algorithm>

namespace lightckpt {
namespace {

constexpr int kTrainer = 0, kCommitter = 1, kWorkers = 2, kParts = 10;

std::vector<uint64_t> common(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  std::vector<uint64_t> both;
  std::ranges::copy_if(a, std::back_inserter(both),
                       [&](uint64_t step) { return std::ranges::find(b, step) != b.end(); });
  return both;
}

std::vector<uint64_t> steps_of(Store* store) {
  std::vector<uint64_t> steps;
  for (const Version& version : store->versions()) steps.push_back(version.slot.step);
  return steps;
}

}  // namespace

History History::of(Model model, uint32_t keep, uint64_t bytes, CatalogKind catalog) {
  const Pages memory(bytes);
  StoreOptions options;
  options.slots = kLifeSlots;
  options.catalog = catalog;
  std::unique_ptr<Store> store;
  auto media = std::make_unique<BorrowedMedia>(memory.get(), bytes, bytes, Granularity::kVolatile);
  auto slots = catalog_of(catalog, memory.get(), kLifeSlots, {});
  CHECK(Store::open(std::move(media), options, true, &store, std::move(slots)).ok());
  return {model, keep, catalog, Buffer(memory.get(), memory.get() + bytes), {}, {}, {}, false};
}

Promise History::promise_at(size_t at) const {
  Promise all;
  for (const Promise& promise : promises) {
    if (promise.from > at) break;
    if (promise.from < at || all.latest.empty()) {
      all = promise;
      continue;
    }
    for (uint64_t step : promise.listed) {
      if (common({step}, all.listed).empty()) all.listed.push_back(step);
    }
    all.possible = common(all.possible, promise.possible);
    std::erase_if(all.latest, [&](uint64_t step) { return !promise.latest.contains(step); });
  }
  return all;
}

Promise History::promise_within(size_t at) const {
  const auto after = std::ranges::find_if(promises, [&](const Promise& p) { return p.from > at; });
  return *std::prev(after);
}

Buffer History::view() const {
  Hardware hardware(initial, model);
  for (const Event& event : events) hardware.apply(event);
  return hardware.view();
}

History History::killed_at(size_t at, uint64_t torn) const {
  History killed = *this;
  killed.events.resize(at);
  std::erase_if(killed.promises, [&](const Promise& promise) { return promise.from > at; });
  if (torn > 0) {
    killed.promises = {promise_within(at)};
    killed.events.push_back(events[at]);
    killed.events.back().data.resize(std::min<uint64_t>(torn, events[at].bytes));
    killed.events.back().bytes = killed.events.back().data.size();
  }
  return killed;
}

Life::Life(History* history)
    : history_(history), base_(history->events.size()), recorder_(heap_offset(kLifeSlots)) {
  actors_ = history->events.empty() ? 0 : (history->events.back().actor / kParts + 1) * kParts;
  const Buffer view = history->view();
  std::ranges::copy(view, memory_.get());
  before_ = history->promise_at(base_);
  auto media = std::make_unique<BorrowedMedia>(memory_.get(), view.size(), kStoreBytesMax,
                                               granularity_of(history->model), &recorder_);
  media->set_trace(&recorder_);
  play(kTrainer, "open");
  std::unique_ptr<Store> store;
  auto slots = catalog_of(history->catalog, memory_.get(), kLifeSlots,
                          [this](const std::string& name, uint64_t offset, Bytes pages) {
                            recorder_.on_change(name, offset, pages);
                          });
  CHECK(Store::open(std::move(media), {}, false, &store, std::move(slots)).ok());
  engine_ = std::make_unique<Engine>(std::move(store), 1);
  if (history->dma) dma_ = std::make_unique<Dma>(engine_.get());
  listed_ = steps_of(&engine_->store());
  if (before_.latest.empty()) {  // it starts on a formatted store, or on what a crash has left
    before_.listed = before_.possible = listed_;
    before_.latest = {latest()};
  }
  // What an atomic catalog shows, no crash takes away.
  vouched_ = listed_ == before_.listed || history->catalog != CatalogKind::kLines;
  before_.from = base_;
  if (base_ == 0) history_->promises.push_back(before_);
}

Life::~Life() {
  engine_.reset();
  for (Event& event : recorder_.take()) history_->events.push_back(std::move(event));
}

void Life::play(int part, const std::string& call) { recorder_.play(actors_ + part, call); }

// A life that follows a kill may have found a version that nobody acknowledged, and that the power
// still takes away, until it has committed one of its own: then it owes only what was acknowledged.
void Life::promise(std::vector<uint64_t> listed, std::vector<uint64_t> possible,
                   std::set<uint64_t> latest_steps) {
  if (!vouched_) {
    listed = common(listed, before_.listed);
    possible.insert(possible.end(), before_.possible.begin(), before_.possible.end());
    latest_steps.insert(before_.latest.begin(), before_.latest.end());
  }
  history_->promises.push_back(
      {base_ + recorder_.count(), std::move(listed), std::move(possible), std::move(latest_steps)});
}

Status Life::wait(uint64_t batch) {
  Report report;
  return engine_->wait(batch, std::chrono::nanoseconds(kDeadline).count(), &report);
}

// The newest `keep`, but not what a rebase gave up, and those that are pinned.
std::vector<uint64_t> Life::kept_by_begin() {
  std::vector<uint64_t> kept;
  uint32_t count = 0;
  uint64_t oldest = UINT64_MAX;
  for (const Version& version : engine_->store().versions()) {
    const bool wanted = count < history_->keep && version.slot.version < oldest;
    if (wanted) {
      ++count;
      oldest = version.slot.version;
    }
    if (wanted || pinned_.contains(version.slot.step)) kept.push_back(version.slot.step);
  }
  return kept;
}

void Life::begin(const State& state, const std::string& call) {
  history_->knowns[state.step] = Known::of(state);
  const std::vector<uint64_t> kept = kept_by_begin();
  promise(kept, listed_, {latest()});
  play(kTrainer, call);
  const Status status =
      engine_->begin(state.step, history_->keep, state.sizes(), state.blob, state.host.size());
  CHECK(status.ok());
  listed_ = kept;
  promise(listed_, listed_, {latest()});
}

// Each extent a batch, and each batch another worker's.
void Life::write(const State& state, const std::string& call) {
  for (uint32_t i = 0; i < state.extents.size(); ++i) {
    auto* memory = const_cast<std::byte*>(state.extents[i].data());
    const std::vector<Span> spans = {{memory, i, 0}};
    play(kWorkers + static_cast<int>(i) % (kParts - kWorkers), call);
    uint64_t batch = 0;
    if (dma_ != nullptr) {
      batch = dma_->write(i, state.extents[i]);
    } else {
      CHECK(engine_->submit(Op::kWrite, 0, spans, &batch).ok());
    }
    CHECK(wait(batch).ok());
    if (history_->model == Model::kPage) recorder_.wait_synced();
  }
}

void Life::save(uint64_t step, const std::vector<uint64_t>& sizes, uint64_t host_bytes) {
  const State state = State::of(step, sizes, host_bytes);
  begin(state, "begin");
  write(state, "write");
  std::vector<uint64_t> with_new = listed_;
  with_new.insert(with_new.begin(), step);
  promise(listed_, with_new, {latest(), step});
  play(kCommitter, "commit");
  uint64_t batch = 0;
  CHECK(engine_->queue_commit(state.host, &batch).ok() && wait(batch).ok());
  listed_ = std::move(with_new);
  vouched_ = true;
  promise(listed_, listed_, {step});
}

void Life::drop(uint64_t step, const std::vector<uint64_t>& sizes) {
  const State state = State::of(step, sizes);
  begin(state, "begin to drop");
  write(state, "write to drop");
  CHECK(engine_->drop(0).ok());
}

uint64_t Life::version_of(uint64_t step) {
  for (const Version& version : engine_->store().versions()) {
    if (version.slot.step == step) return version.slot.version;
  }
  CHECK(false);
}

void Life::rebase(uint64_t step) {
  const std::vector<uint64_t> older(std::ranges::find(listed_, step), listed_.end());
  promise(older, listed_, {latest(), step});
  play(kTrainer, "rebase");
  CHECK(engine_->rebase(version_of(step)).ok());
  pinned_ = {};
  listed_ = older;
  promise(listed_, listed_, {step});
}

void Life::pin(uint64_t step, bool pinned) {
  CHECK(engine_->store().pin(version_of(step), pinned).ok());
  if (pinned) {
    pinned_.insert(step);
  } else {
    pinned_.erase(step);
  }
}

}  // namespace lightckpt
