// What a crash may leave of a media, from the trace of what was done to it.
//
// The model. Every write lies in its 64-byte line until something makes it durable; at a crash a
// line may have been written back at any time, so of its cached stores a prefix is kept, the last
// of them in part; of non-temporal stores, which wait in buffers, any 8-byte word may be kept or
// not. A flush marks what the line holds for the thread that flushes, and a thread's fence makes
// durable what that thread flushed or stored past the cache; another thread's fence does nothing
// for it. On pages only a sync makes anything durable, and all of the pages that it touches. With
// caches in the persistence domain a cached store is durable at once. That is more than hardware
// does, never less.
//
// The shape of the model is Yat's (Lantz et al., USENIX ATC 2014) and pmemcheck's; that lines keep
// prefixes and words may tear is from Intel's persistent memory programming guide.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "helpers.h"
#include "media.h"

namespace lightckpt {

struct TraceEvent {
  MediaEvent::Kind kind;
  int actor = 0;  // the thread that causes it
  uint64_t offset = 0;
  uint64_t bytes = 0;
  Buffer data;
};

// Keeps every event under the name of the thread that the test says it plays.
class Recorder final : public MediaTrace {
 public:
  void on_event(const MediaEvent& event) override {
    Buffer data;
    if (event.data != nullptr) data.assign(event.data, event.data + event.bytes);
    events_.push_back({event.kind, actor_, event.offset, event.bytes, std::move(data)});
  }
  void play(int actor) { actor_ = actor; }
  const std::vector<TraceEvent>& events() const { return events_; }

 private:
  int actor_ = 0;
  std::vector<TraceEvent> events_;
};

class CrashSim {
 public:
  CrashSim(Buffer durable, Granularity granularity)
      : durable_(std::move(durable)), granularity_(granularity) {}

  void apply(const TraceEvent& event) {
    switch (event.kind) {
      case MediaEvent::Kind::kStore:
      case MediaEvent::Kind::kDmaDone:
        return write(event, false);
      case MediaEvent::Kind::kNtCopy:
        return write(event, true);
      case MediaEvent::Kind::kFlush:
        return flush(event);
      case MediaEvent::Kind::kFence:
        return fence(event.actor);
      case MediaEvent::Kind::kSync:
        return sync(event);
    }
  }

  // One of the images that a crash now may leave.
  Buffer image(uint64_t seed) const {
    std::mt19937_64 random(seed);
    const uint64_t percent = random() % 5 * 25;  // how much of it gets out, at a guess
    const auto kept = [&] { return random() % 100 < percent; };
    Buffer image = durable_;
    for (const auto& [line, writes] : pending_) {
      bool prefix = true;  // every cached store so far was kept
      for (const Write& write : writes) {
        const bool whole = prefix && kept();
        for (uint64_t at = write.begin; at < write.end; at = next_word(at)) {
          const bool word = write.past_cache ? kept() : whole || (prefix && kept());
          if (word) put(&image, line, write, at, std::min(next_word(at), write.end));
        }
        if (!write.past_cache) prefix = whole;
      }
    }
    return image;
  }

 private:
  struct Write {
    uint64_t begin;  // within the line
    uint64_t end;
    std::array<std::byte, kLineBytes> data;
    int actor;
    bool past_cache;
    uint64_t flushed_by;  // bit per actor
  };

  static uint64_t next_word(uint64_t at) { return (at / 8 + 1) * 8; }

  static void put(Buffer* image, uint64_t line, const Write& write, uint64_t begin, uint64_t end) {
    std::copy(write.data.begin() + begin, write.data.begin() + end, image->begin() + line + begin);
  }

  void write(const TraceEvent& event, bool non_temporal) {
    const uint64_t end = event.offset + event.bytes;
    for (uint64_t at = event.offset; at < end;) {
      const uint64_t line = at / kLineBytes * kLineBytes;
      const uint64_t until = std::min(end, line + kLineBytes);
      const bool whole = until - at == kLineBytes;
      Write write = {at - line, until - line, {}, event.actor, non_temporal && whole, 0};
      const auto source = event.data.begin() + (at - event.offset);
      std::copy(source, source + (until - at), write.data.begin() + (at - line));
      if (granularity_ == Granularity::kByte && !write.past_cache) {
        put(&durable_, line, write, write.begin, write.end);
      } else {
        pending_[line].push_back(write);
      }
      at = until;
    }
  }

  void flush(const TraceEvent& event) {
    if (event.bytes == 0) return;
    const auto end = pending_.lower_bound(event.offset + event.bytes);
    for (auto it = pending_.lower_bound(event.offset / kLineBytes * kLineBytes); it != end; ++it) {
      for (Write& write : it->second) write.flushed_by |= uint64_t{1} << event.actor;
    }
  }

  void fence(int actor) {
    if (granularity_ == Granularity::kPage) return;
    settle(0, durable_.size(), [actor](const Write& write) {
      return write.past_cache ? write.actor == actor : (write.flushed_by >> actor & 1) != 0;
    });
  }

  void sync(const TraceEvent& event) {
    constexpr uint64_t kPage = 4096;
    const uint64_t end = (event.offset + event.bytes + kPage - 1) / kPage * kPage;
    settle(event.offset / kPage * kPage, end, [](const Write&) { return true; });
  }

  // Makes the writes durable that `is_durable` says, of lines in [begin, end).
  template <typename IsDurable>
  void settle(uint64_t begin, uint64_t end, IsDurable is_durable) {
    for (auto it = pending_.lower_bound(begin); it != pending_.end() && it->first < end;) {
      auto& [line, writes] = *it;
      for (const Write& write : writes) {
        if (is_durable(write)) put(&durable_, line, write, write.begin, write.end);
      }
      std::erase_if(writes, is_durable);
      it = writes.empty() ? pending_.erase(it) : std::next(it);
    }
  }

  Buffer durable_;
  Granularity granularity_;
  std::map<uint64_t, std::vector<Write>> pending_;  // by line, oldest first
};

}  // namespace lightckpt
