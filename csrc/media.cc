// The primitives, the same for every media: what differs is how a flush is done and a drain ends.
#include "media.h"

#include <algorithm>

#include "sigbus.h"

namespace lightckpt {

void RangeSet::add(uint64_t begin, uint64_t end) {
  if (begin >= end) return;
  auto next = ranges_.upper_bound(begin);
  if (next != ranges_.begin() && std::prev(next)->second >= begin) {
    --next;
    begin = next->first;
  }
  while (next != ranges_.end() && next->first <= end) {
    end = std::max(end, next->second);
    next = ranges_.erase(next);
  }
  ranges_.emplace(begin, end);
}

bool RangeSet::contains(uint64_t begin, uint64_t end) const {
  auto next = ranges_.upper_bound(begin);
  return next != ranges_.begin() && std::prev(next)->second >= end;
}

void Media::trace(MediaEvent::Kind kind, uint64_t offset, uint64_t bytes, const std::byte* data) {
  if (trace_ != nullptr) trace_->on_event({kind, offset, bytes, data});
}

const std::byte* Media::view() const {
  SigbusGuard::arm();
  return base_;
}

void Media::store(uint64_t offset, Bytes source) {
  CHECK(offset <= size_ && source.size() <= size_ - offset);
  trace(MediaEvent::Kind::kStore, offset, source.size(), source.data());
  SigbusGuard::arm();
  std::memcpy(base_ + offset, source.data(), source.size());
}

void Media::nt_copy(uint64_t offset, Bytes source) {
  CHECK(offset <= size_ && source.size() <= size_ - offset);
  trace(MediaEvent::Kind::kNtCopy, offset, source.size(), source.data());
  before_copy();
  SigbusGuard::arm();
  copy_nt(base_ + offset, source.data(), source.size());
  flush_ragged_end(offset, source.size());
  after_copy(source.size());
}

uint32_t Media::nt_copy_crc(uint64_t offset, Bytes source) {
  CHECK(offset <= size_ && source.size() <= size_ - offset);
  trace(MediaEvent::Kind::kNtCopy, offset, source.size(), source.data());
  before_copy();
  SigbusGuard::arm();
  const uint32_t crc = copy_nt_crc(base_ + offset, source.data(), source.size());
  flush_ragged_end(offset, source.size());
  after_copy(source.size());
  return crc;
}

// A copy's partial lines were written by plain stores and lie in the cache.
void Media::flush_ragged_end(uint64_t offset, uint64_t bytes) {
  if (granularity_ == Granularity::kPage) return flush(offset, bytes);
  if (offset % kLineBytes != 0) flush(offset, std::min(bytes, kLineBytes - offset % kLineBytes));
  const uint64_t end = offset + bytes;
  if (end % kLineBytes != 0) {
    const uint64_t tail = std::max(offset, end / kLineBytes * kLineBytes);
    flush(tail, end - tail);
  }
}

void Media::flush(uint64_t offset, uint64_t bytes) {
  trace(MediaEvent::Kind::kFlush, offset, bytes, nullptr);
  if (granularity_ == Granularity::kPage) {
    const MutexLock lock(pending_mutex_);
    pending_.add(offset, offset + bytes);
  } else {
    write_back(flush_method_, base_ + offset, bytes);
  }
}

void Media::fence() {
  trace(MediaEvent::Kind::kFence, 0, 0, nullptr);
  // Needed on every media: without it another thread may see a copy's "done" before its bytes.
  store_fence();
}

void Media::dma_done(uint64_t offset, uint64_t bytes) {
  trace(MediaEvent::Kind::kDmaDone, offset, bytes, base_ + offset);
  before_copy();
  flush(offset, bytes);
  after_copy(bytes);
}

Status Media::drain() {
  fence();
  if (granularity_ != Granularity::kPage) return {};
  const MutexLock drain_lock(drain_mutex_);
  // A later one that succeeds says nothing of those ranges: the kernel takes them for written.
  if (!drain_failed_.ok()) return drain_failed_;
  RangeSet pending;
  {
    const MutexLock lock(pending_mutex_);
    std::swap(pending, pending_);
  }
  for (const auto& [begin, end] : pending.ranges()) {
    trace(MediaEvent::Kind::kSync, begin, end - begin, nullptr);
    const Status status = sync(begin, end - begin);
    if (status.ok()) continue;
    shaken_ = status.code() == Code::kNoSpace;
    drain_failed_ = {shaken_ ? Code::kNoSpace : Code::kLost, status.message()};
    const MutexLock lock(pending_mutex_);
    for (const auto& [first, last] : pending.ranges()) pending_.add(first, last);
    return drain_failed_;
  }
  return {};
}

Status Media::recover() {
  const MutexLock lock(drain_mutex_);
  if (drain_failed_.code() == Code::kLost) return drain_failed_;
  drain_failed_ = {};
  shaken_ = false;
  return {};
}

}  // namespace lightckpt
