// Media for tests: memory whose drain, check and growth can be made to fail; a log of events; and a
// gate that holds a thread at an event, so that tests order threads without waiting for time.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "helpers.h"
#include "media.h"

namespace lightckpt {

using EventKind = MediaEvent::Kind;

// A hook is called in place of what would have happened; without one, all goes well.
class TestMedia final : public Media {
 public:
  explicit TestMedia(uint64_t bytes, uint64_t capacity = 0,
                     Granularity granularity = Granularity::kVolatile)
      : memory_(static_cast<std::byte*>(
            ::operator new(std::max(bytes, capacity), std::align_val_t{4096}))),
        capacity_(std::max(bytes, capacity)) {
    std::memset(memory_, 0, capacity_);
    base_ = memory_;
    size_ = bytes;
    granularity_ = granularity;
  }
  ~TestMedia() override { ::operator delete(memory_, std::align_val_t{4096}); }

  // Past all primitives: what a failing device or a test does to the bytes.
  std::byte* memory() { return memory_; }
  Buffer bytes() const { return Buffer(memory_, memory_ + size_); }
  // The media claims this size without having it.
  void pretend_size(uint64_t bytes) { size_ = bytes; }

  Status grow(uint64_t bytes) override {
    if (on_grow) return on_grow(bytes);
    if (bytes > capacity_) return {Code::kNoSpace, "test media is full"};
    size_ = std::max(size(), bytes);
    return {};
  }
  Status check() const override { return on_check ? on_check() : Status(); }
  void populate(uint64_t, uint64_t) override {}

  // Set before other threads use the media.
  std::function<Status(uint64_t offset, uint64_t bytes)> on_sync;
  std::function<Status()> on_check;
  std::function<Status(uint64_t bytes)> on_grow;

 protected:
  Status sync(uint64_t offset, uint64_t bytes) override {
    return on_sync ? on_sync(offset, bytes) : Status();
  }

 private:
  std::byte* memory_;
  uint64_t capacity_;
};

// Keeps every event with the bytes it was about to write.
class EventLog final : public MediaTrace {
 public:
  struct Event {
    EventKind kind;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    Buffer data;
    std::thread::id thread;
  };

  void on_event(const MediaEvent& event) override {
    std::lock_guard lock(mutex_);
    Buffer data;
    if (event.data != nullptr) data.assign(event.data, event.data + event.bytes);
    events_.push_back(
        {event.kind, event.offset, event.bytes, std::move(data), std::this_thread::get_id()});
  }
  std::vector<Event> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Event> events_;
};

// Something that happens once, on any thread.
class Signal {
 public:
  void set() {
    std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  // False after the deadline.
  bool wait() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kDeadline, [&] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

// Holds each thread that causes an event for which `holds` says so, until the gate is opened.
class Gate final : public MediaTrace {
 public:
  explicit Gate(std::function<bool(const MediaEvent&)> holds) : holds_(std::move(holds)) {}

  void on_event(const MediaEvent& event) override {
    if (!holds_(event)) return;
    std::unique_lock lock(mutex_);
    ++held_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    --held_;
  }
  // Waits until `count` threads stand at the gate; false after the deadline.
  bool wait_held(int count = 1) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kDeadline, [&] { return held_ >= count; });
  }
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::function<bool(const MediaEvent&)> holds_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int held_ = 0;
  bool open_ = false;
};

}  // namespace lightckpt
