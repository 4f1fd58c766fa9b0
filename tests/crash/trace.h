// What was done to a media, in order: the events of its primitives with the bytes they were about
// to write, the actor that caused each, and the place in the protocol where it did.
//
// Actors. A fence orders what its own thread did and nothing else, so the hardest schedule for a
// protocol gives every part of it a thread of its own: begin and rebase the trainer's, each batch
// another worker's, commit one more. The engine under test has one worker, which makes its trace
// the same every time; the recorder gives that worker's events the names that the workers of a
// larger engine would have. Whatever passes so, passes with fewer threads.
#pragma once

#include <condition_variable>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "format.h"
#include "helpers.h"
#include "media.h"

namespace lightckpt {

struct Event {
  MediaEvent::Kind kind;
  bool grows = false;   // not one of the primitives: the media has `bytes` bytes from here on
  bool atomic = false;  // nor is this: the change of a catalog, durable at once
  int actor = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  Buffer data = {};
  std::string site = {};  // "commit: fence of slot"

  bool writes() const { return !data.empty(); }
  bool tears() const { return writes() && !atomic; }
  bool waits() const {
    return !grows && (kind == MediaEvent::Kind::kFence || kind == MediaEvent::Kind::kSync);
  }
};

inline const char* name_of(MediaEvent::Kind kind) {
  static constexpr const char* kNames[] = {"store", "nt_copy",  "flush",
                                           "fence", "dma_done", "sync"};
  return kNames[static_cast<int>(kind)];
}

// Keeps every event, from one actor and in one call at a time.
class Recorder final : public MediaTrace {
 public:
  explicit Recorder(uint64_t heap) : heap_(heap) {}

  void on_event(const MediaEvent& event) override {
    std::lock_guard lock(mutex_);
    Buffer data;
    if (event.data != nullptr) data.assign(event.data, event.data + event.bytes);
    if (!data.empty()) {
      const bool zeros = std::ranges::all_of(data, [](std::byte b) { return b == std::byte{0}; });
      target_ = event.offset >= heap_ ? "data" : zeros ? "retired slot" : "slot";
    }
    if (event.kind == MediaEvent::Kind::kFlush) undrained_.add(event.offset, end_of(event));
    if (event.kind == MediaEvent::Kind::kSync) synced_.add(event.offset, end_of(event));
    const std::string site = call_ + ": " + name_of(event.kind) + " of " + target_;
    events_.push_back({.kind = event.kind,
                       .actor = actor_,
                       .offset = event.offset,
                       .bytes = event.bytes,
                       .data = std::move(data),
                       .site = site});
    changed_.notify_all();
  }
  void on_grow(uint64_t bytes) {
    std::lock_guard lock(mutex_);
    events_.push_back({.kind = MediaEvent::Kind::kStore,
                       .grows = true,
                       .actor = actor_,
                       .bytes = bytes,
                       .site = call_ + ": growth"});
  }
  void on_change(const std::string& name, uint64_t offset, Bytes data) {
    std::lock_guard lock(mutex_);
    events_.push_back({.kind = MediaEvent::Kind::kStore,
                       .atomic = true,
                       .actor = actor_,
                       .offset = offset,
                       .bytes = data.size(),
                       .data = Buffer(data.begin(), data.end()),
                       .site = call_ + ": transaction to " + name});
  }

  // Who causes the events from here on, and in which call.
  void play(int actor, const std::string& call) {
    std::lock_guard lock(mutex_);
    actor_ = actor;
    call_ = call;
    target_ = "slots";
  }
  // A plain file's writes are synced by a worker after their batch is done: waits for the last.
  void wait_synced() {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, kDeadline, [&] {
      return std::ranges::all_of(undrained_.ranges(), [&](const auto& range) {
        return synced_.contains(range.first, range.second);
      });
    }));
    undrained_ = synced_ = {};
  }
  size_t count() const {
    std::lock_guard lock(mutex_);
    return events_.size();
  }
  std::vector<Event> take() {
    std::lock_guard lock(mutex_);
    return std::move(events_);
  }

 private:
  static uint64_t end_of(const MediaEvent& event) { return event.offset + event.bytes; }

  const uint64_t heap_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int actor_ = 0;
  std::string call_ = "open";
  std::string target_ = "slots";
  RangeSet undrained_;
  RangeSet synced_;
  std::vector<Event> events_;
};

// Memory that somebody else owns, as media. Tells a recorder, if there is one, of its growth.
class BorrowedMedia final : public Media {
 public:
  BorrowedMedia(std::byte* memory, uint64_t bytes, uint64_t capacity, Granularity granularity,
                Recorder* recorder = nullptr)
      : capacity_(capacity), recorder_(recorder) {
    base_ = memory;
    size_ = bytes;
    granularity_ = granularity;
  }

  Status grow(uint64_t bytes) override {
    if (bytes > capacity_) return {Code::kNoSpace, "the borrowed memory is full"};
    if (bytes > size() && recorder_ != nullptr) recorder_->on_grow(bytes);
    size_ = std::max(size(), bytes);
    return {};
  }
  Status check() const override { return {}; }
  void populate(uint64_t, uint64_t) override {}

 protected:
  Status sync(uint64_t, uint64_t) override { return {}; }

 private:
  uint64_t capacity_;
  Recorder* recorder_;
};

// Memory aligned to pages, as a mapping is.
class Pages {
 public:
  explicit Pages(uint64_t bytes)
      : memory_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kPageBytes}))) {
    std::memset(memory_, 0, bytes);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { ::operator delete(memory_, std::align_val_t{kPageBytes}); }

  std::byte* get() const { return memory_; }

 private:
  std::byte* memory_;
};

}  // namespace lightckpt
