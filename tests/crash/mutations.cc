// See mutations.h.
#include "mutations.h"

#include <algorithm>

namespace lightckpt {
namespace {

bool is(const Event& event, MediaEvent::Kind kind) { return !event.grows && event.kind == kind; }

// A fence that begins a drain on pages: syncs follow.
bool drains(const std::vector<Event>& events, size_t at) {
  return is(events[at], MediaEvent::Kind::kFence) && at + 1 < events.size() &&
         is(events[at + 1], MediaEvent::Kind::kSync);
}

}  // namespace

// A barrier at which all that it waits for is durable as it is cannot be missed: it is only
// counted.
Mutations::Mutations(const History& history) : history_(history) {
  const std::vector<Event>& events = history.events;
  Hardware hardware(history.initial, history.model);
  for (size_t at = 0; at < events.size(); ++at) {
    const Buffer before = hardware.durable();
    const bool flushes = is(events[at], MediaEvent::Kind::kFlush) && events[at].bytes > 0;
    const bool starts = flushes && hardware.flush_matters(events[at]);
    const bool drain = drains(events, at);
    Hardware after = hardware;
    for (size_t i = at; i == at || (drain && is(events[i], MediaEvent::Kind::kSync)); ++i) {
      after.apply(events[i]);
      if (i + 1 == events.size()) break;
    }
    hardware.apply(events[at]);
    if (!flushes && !events[at].waits()) continue;
    if (starts || (events[at].waits() && after.durable() != before)) {
      barriers_.push_back({at, drain});
    } else {
      ++idle_;
    }
  }
}

Mutation Mutations::at(size_t index) const {
  const Barrier& barrier = barriers_[index];
  std::string site = history_.events[barrier.event].site;
  if (barrier.drain) site.replace(site.find("fence"), 5, "drain");
  return {site, barrier.event, without(barrier.event, barrier.drain)};
}

// On pages, what is synced follows from what was flushed since the last drain: a flush that is left
// out takes its range along, and a drain that is left out leaves its ranges to the next.
History Mutations::without(size_t left_out, bool drain) const {
  History mutated = history_;
  mutated.events.clear();
  const std::vector<Event>& events = history_.events;
  const bool sync = is(events[left_out], MediaEvent::Kind::kSync);
  std::vector<size_t> now_at;  // where each event has gone, for the promises
  RangeSet pending;
  for (size_t at = 0; at < events.size(); ++at) {
    const Event& event = events[at];
    now_at.push_back(mutated.events.size());
    const bool recomputed = history_.model == Model::kPage && !sync;
    if (at != left_out && !(recomputed && is(event, MediaEvent::Kind::kSync))) {
      mutated.events.push_back(event);
    }
    if (!recomputed) continue;
    if (is(event, MediaEvent::Kind::kFlush) && at != left_out) {
      pending.add(event.offset, event.offset + event.bytes);
    }
    if (!drains(events, at) || (drain && at == left_out)) continue;
    for (const auto& [begin, end] : pending.ranges()) {
      mutated.events.push_back(events[at + 1]);
      mutated.events.back().offset = begin;
      mutated.events.back().bytes = end - begin;
    }
    pending = {};
  }
  now_at.push_back(mutated.events.size());
  for (Promise& promise : mutated.promises) promise.from = now_at[promise.from];
  return mutated;
}

const std::vector<NotNeeded>& barriers_not_needed() {
  static const char* const kDropped =
      "nothing ever refers to what an attempt wrote that is dropped";
  static const char* const kAgain =
      "the rebased version's old slot is written again before what it names is given up";
  static const std::vector<NotNeeded> all = {
      {Model::kLine, "", "write to drop: flush of data", kDropped},
      {Model::kLine, "", "write to drop: fence of data", kDropped},
      {Model::kLine, "dropped structures", "begin to drop: flush of data", kDropped},
      {Model::kLine, "dropped structures", "begin to drop: fence of data", kDropped},
      {Model::kPage, "dropped structures", "begin to drop: flush of data", kDropped},
      {Model::kPage, "", "write to drop: flush of data", kDropped},
      {Model::kPage, "", "write to drop: drain of data", kDropped},
      {Model::kPage, "", "write to drop: sync of data", kDropped},
      {Model::kLine, "rebase, keep 3", "rebase: flush of retired slot", kAgain},
      {Model::kPage, "rebase, keep 3", "rebase: flush of retired slot", kAgain},
      {Model::kPage, "rebase, keep 3", "rebase: sync of retired slot", kAgain},
      {Model::kPage, "", "write: drain of data",
       "it only starts early what the commit's drain would do: that one takes what is left"},
      {Model::kPage, "", "commit: flush of data",
       "the record's head and the host state behind it share a page, and one of them suffices"},
  };
  return all;
}

}  // namespace lightckpt
