// Media on a file system that copies on write and is full now and then. As there, two things fail:
// a store to a page for which there is no block (the page is replaced by one that is nobody's, as
// sigbus.h does), and a sync. What a page is, is modelled to the end: the view that all processes
// see, what is durable, and what is dirty; a page whose writing back failed counts as clean, and
// the kernel may read it from the disk again at any later time.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "helpers.h"
#include "media.h"

namespace lightckpt {

class FullMedia final : public Media, public MediaTrace {
 public:
  static constexpr uint64_t kUnit = 4096;

  // What becomes of the pages of a sync that failed.
  enum class After { kWritten, kKept, kReadAgain };

  explicit FullMedia(uint64_t bytes, Granularity granularity, After after)
      : memory_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kUnit}))),
        durable_(bytes),
        after_(after) {
    std::memset(memory_, 0, bytes);
    base_ = memory_;
    size_ = bytes;
    granularity_ = granularity;
    set_trace(this);
  }
  ~FullMedia() override { ::operator delete(memory_, std::align_val_t{kUnit}); }

  // Asked before each store and sync, which are counted together: does this one fail?
  std::function<bool(uint64_t index)> fails_at;
  uint64_t events() const { return events_; }

  // What a machine that loses its power now finds, and what a process that comes later does.
  Buffer durable() const {
    return granularity_ == Granularity::kPage ? durable_ : seen_by_others();
  }
  Buffer seen_by_others() const {
    Buffer bytes(memory_, memory_ + size_);
    for (const auto& [page, before] : replaced_) std::ranges::copy(before, bytes.begin() + page);
    return bytes;
  }

  Status grow(uint64_t bytes) override {
    return bytes <= size_ ? Status() : Status(Code::kNoSpace, "the test media is full");
  }
  Status check() const override {
    return replaced_.empty() ? Status() : Status(Code::kNoSpace, "no block for a page");
  }
  bool shaken() const override { return Media::shaken() || !replaced_.empty(); }
  Status recover() override {
    for (const auto& [page, before] : replaced_) std::ranges::copy(before, memory_ + page);
    replaced_.clear();
    for (uint64_t page : std::exchange(read_again_, {})) {
      std::copy_n(durable_.begin() + page, kUnit, memory_ + page);
    }
    return Media::recover();
  }
  void populate(uint64_t, uint64_t) override {}

  void on_event(const MediaEvent& event) override {
    if (event.data == nullptr) return;
    const bool fails = fails_at && fails_at(events_);
    ++events_;
    const uint64_t end = event.offset + event.bytes;
    for (uint64_t page = event.offset / kUnit * kUnit; page < end; page += kUnit) {
      if (fails && !replaced_.contains(page)) {
        replaced_.emplace(page, Buffer(memory_ + page, memory_ + page + kUnit));
        std::memset(memory_ + page, 0, kUnit);
      }
      if (replaced_.contains(page)) continue;
      dirty_.insert(page);
      read_again_.erase(page);
    }
  }

 protected:
  Status sync(uint64_t offset, uint64_t bytes) override {
    const bool fails = fails_at && fails_at(events_);
    ++events_;
    for (uint64_t page = offset / kUnit * kUnit; page < offset + bytes; page += kUnit) {
      if (dirty_.erase(page) == 0) continue;
      if (!fails || after_ == After::kWritten) {
        std::copy_n(memory_ + page, kUnit, durable_.begin() + page);
      } else if (after_ == After::kReadAgain) {
        read_again_.insert(page);
      }
    }
    return fails ? Status(Code::kNoSpace, "no block for what is written back") : Status();
  }

 private:
  std::byte* memory_;
  Buffer durable_;
  After after_;
  uint64_t events_ = 0;
  std::map<uint64_t, Buffer> replaced_;  // by page, as the file has it
  std::set<uint64_t> dirty_;
  std::set<uint64_t> read_again_;
};

}  // namespace lightckpt
