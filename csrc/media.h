// Media: bytes that outlive the process, the five primitives that touch them, and drain.
//
//   store      plain stores into the CPU's view. After a crash they may be there, in part, or not.
//   nt_copy    the same by non-temporal stores, for whole lines; optionally with a checksum.
//   flush      starts a range on its way to the persistence domain. No order is implied.
//   fence      waits for this thread's non-temporal stores and flushes; other threads' have theirs.
//   dma_done   says that a device wrote a range, and flushes it: DDIO may have left it in a cache.
//
//   drain      fence, and on a plain file msync of all that was flushed: the only step that can
//              fail. What reached the media is unknown then, and stays so: no later drain says
//              otherwise. That is final (kLost), but where the file system was full (kNoSpace).
//
// A full file system may have room again. Until then the media is *shaken*: drain fails, or check.
// recover() makes it usable, and nothing more: whoever calls it writes once more what it relies on.
//
// The words are PMDK's (libpmem2(7): persist = flush + drain). All code that changes a media goes
// through these, so a trace of them is all that is needed to enumerate offline what a crash may
// leave. Threads: any; grow from one at a time, beside the others; set_trace needs the media to
// itself.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>

#include "copy.h"
#include "status.h"
#include "thread_annotations.h"

namespace lightckpt {

using Bytes = std::span<const std::byte>;

enum class Granularity : uint32_t { kByte = 0, kCacheLine = 1, kPage = 2, kVolatile = 3 };
enum class MediaKind : uint32_t { kAuto = 0, kPmem, kFile, kTmpfs, kHeap, kEmulated };

struct MediaEvent {
  enum class Kind { kStore, kNtCopy, kFlush, kFence, kDmaDone, kSync };
  Kind kind;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  const std::byte* data = nullptr;  // what a store or copy is about to write
};

// Receives every event on the thread that causes it, before it takes effect.
class MediaTrace {
 public:
  virtual ~MediaTrace() = default;
  virtual void on_event(const MediaEvent& event) = 0;
};

// Disjoint ranges, joined where they touch.
class RangeSet {
 public:
  void add(uint64_t begin, uint64_t end);
  bool contains(uint64_t begin, uint64_t end) const;
  const std::map<uint64_t, uint64_t>& ranges() const { return ranges_; }  // begin -> end
  bool empty() const { return ranges_.empty(); }

 private:
  std::map<uint64_t, uint64_t> ranges_;
};

class Media {
 public:
  virtual ~Media() = default;
  Media(const Media&) = delete;
  Media& operator=(const Media&) = delete;

  uint64_t size() const { return size_; }
  // Call it for each look: it sees to it that a page which is gone is an error and not a death.
  const std::byte* view() const;
  // The same bytes for somebody who may write to them without changing the store: a reader's own
  // copies of pages. Of a device, and on a writer's media, it is the view.
  virtual std::byte* private_view() { return base_; }
  // Gives up what was written to private copies of these pages.
  virtual void forget_private(uint64_t, uint64_t) {}
  MediaKind kind() const { return kind_; }
  Granularity granularity() const { return granularity_; }
  FlushMethod flush_method() const { return flush_method_; }
  bool emulated() const { return emulated_; }

  void store(uint64_t offset, Bytes source);
  void nt_copy(uint64_t offset, Bytes source);
  uint32_t nt_copy_crc(uint64_t offset, Bytes source);
  void flush(uint64_t offset, uint64_t bytes);
  void fence();
  void dma_done(uint64_t offset, uint64_t bytes);
  Status drain();

  // Makes the media `bytes` long, allocated; kNoSpace leaves it as it was. Pointers stay valid.
  virtual Status grow(uint64_t bytes) = 0;
  // Takes in what another process has added; true if there was anything. For readers.
  virtual bool follow() { return false; }
  // Is all of it still there, and has no access met a missing page?
  virtual Status check() const = 0;
  // Has something failed, since the last recover(), for want of space only?
  virtual bool shaken() const { return shaken_; }
  virtual Status recover();
  // Maps the pages of a range now, so that later accesses take no fault. Done once per range.
  virtual void populate(uint64_t offset, uint64_t bytes) = 0;

  // The open file below, to tell whether another one is the same; -1 where there is none.
  virtual int descriptor() const { return -1; }
  // Its file has another name from now on: messages use it.
  virtual void set_path(const std::string&) {}
  // May an access hang, for as long as it likes? Who has a deadline makes none then.
  virtual bool may_stall() const { return granularity_ == Granularity::kPage; }
  // How often the device lost power before it had written what it held, where that is known.
  virtual std::optional<uint64_t> unsafe_shutdowns() const { return {}; }

  void set_trace(MediaTrace* trace) { trace_ = trace; }

 protected:
  Media() = default;

  // Makes a range durable; asked for only when the granularity is kPage.
  virtual Status sync(uint64_t offset, uint64_t bytes) = 0;
  // Around each copy, and where a device has written: what makes a media slow has its place here.
  virtual void before_copy() {}
  virtual void after_copy(uint64_t) {}

  std::byte* base_ = nullptr;
  std::atomic<uint64_t> size_ = 0;  // grows while others look at it
  MediaKind kind_ = MediaKind::kHeap;
  Granularity granularity_ = Granularity::kVolatile;
  FlushMethod flush_method_ = FlushMethod::kNone;
  bool emulated_ = false;

 private:
  void trace(MediaEvent::Kind kind, uint64_t offset, uint64_t bytes, const std::byte* data);
  void flush_ragged_end(uint64_t offset, uint64_t bytes);

  MediaTrace* trace_ = nullptr;
  Mutex pending_mutex_;                          // taken under the next, never the other way round
  RangeSet pending_ GUARDED_BY(pending_mutex_);  // flushed since the last drain, kPage only
  Mutex drain_mutex_;  // a drain returns only after the ones that took ranges before it
  Status drain_failed_ GUARDED_BY(drain_mutex_);  // the first that failed
  std::atomic<bool> shaken_ = false;              // that failed for want of space
};

}  // namespace lightckpt
