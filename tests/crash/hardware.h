// What a crash may leave of a media, from the events so far. Three kinds of hardware:
//
//   line  (ADR)   A write lies in its 64-byte line until it is durable; at a crash the line may
//                 have been written back at any instant. Of its cached stores a prefix is kept and
//                 any words of the next; of non-temporal stores any 8-byte words. A flush marks
//                 what the line holds for the thread that flushes; a thread's fence makes durable
//                 what that thread flushed or stored past the cache, and no other thread's.
//   order (eADR)  All stores are durable in one global order: any prefix, to the word, may be
//                 there.
//   page  (file)  A write lies in the page cache. Any page may be written back at any instant and
//                 is torn at 512 bytes, so each sector is as it was after any prefix of its writes.
//                 Only a sync makes durable, and all of the 4096-byte pages that it touches.
//
// On each, a catalog's change is durable whole or not at all, and makes nothing else durable.
//
// The shape of the model is Yat's (Lantz et al., USENIX ATC 2014) and pmemcheck's. It allows more
// than hardware does, never less.
#pragma once

#include <array>
#include <map>
#include <random>

#include "trace.h"

namespace lightckpt {

enum class Model { kLine, kOrder, kPage };

inline const char* name_of(Model model) {
  return model == Model::kLine ? "line" : model == Model::kOrder ? "order" : "page";
}

inline Granularity granularity_of(Model model) {
  return model == Model::kLine    ? Granularity::kCacheLine
         : model == Model::kOrder ? Granularity::kByte
                                  : Granularity::kPage;
}

// A piece of the media that is left in one of several ways, whatever happens to other pieces.
struct ImagePiece {
  uint64_t offset;
  std::vector<Buffer> contents;  // the first: nothing of it got out; the second: all of it
};

class Hardware {
 public:
  Hardware(Buffer durable, Model model) : durable_(std::move(durable)), model_(model) {}

  void apply(const Event& event);
  // What the CPU sees, and a process that is started after another was killed.
  Buffer view() const;

  const Buffer& durable() const { return durable_; }
  // Does a flush of this range start anything that is not durable as it is?
  bool flush_matters(const Event& event) const;
  // What may be there or not, at a crash before `next`, or within it where all is in one order.
  // Random choices follow from the seed.
  std::vector<ImagePiece> pieces(const Event* next, uint64_t seed) const;

 private:
  // Part of one line.
  struct Write {
    uint64_t bytes;  // a bit for each of the line's that it writes
    std::array<std::byte, kLineBytes> data;
    int actor;
    bool past_cache;
    uint64_t flushed_by;  // a bit per actor
    uint64_t order;
  };
  using Lines = std::map<uint64_t, std::vector<Write>>;  // by offset; writes oldest first
  struct Run {
    uint64_t begin;
    uint64_t end;
    std::vector<std::pair<uint64_t, const Write*>> writes;  // oldest first
  };

  // Puts those of the write's bytes that are in the mask into the line.
  static void put(const Write& write, uint64_t mask, std::byte* line);
  void write_at_once(const Event& event);
  void write(const Event& event);
  void flush(const Event& event);
  template <typename IsDurable>
  void settle(uint64_t begin, uint64_t end, IsDurable is_durable);
  std::vector<Run> runs(uint64_t unit) const;
  Buffer durable_at(const Run& run) const;
  ImagePiece every_way(const Run& run, std::mt19937_64* random) const;
  ImagePiece some_ways(const Run& run, std::mt19937_64* random) const;
  ImagePiece prefixes(const Event& next) const;
  ImagePiece snapshots(const Run& run, std::mt19937_64* random) const;

  Buffer durable_;
  Model model_;
  Lines pending_;
  uint64_t order_ = 0;
};

}  // namespace lightckpt
