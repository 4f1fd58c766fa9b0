// See hardware.h.
#include "hardware.h"

#include <algorithm>
#include <set>
#include <utility>

namespace lightckpt {
namespace {

constexpr uint64_t kSectorBytes = 512;
constexpr uint64_t kGroupLines = 8;      // so many lines in a row are one piece
constexpr uint64_t kChoiceBitsMax = 10;  // words of one line that are chosen exhaustively

constexpr uint64_t kWords = kLineBytes / 8;

uint64_t next_word(uint64_t at) { return (at / 8 + 1) * 8; }

constexpr uint64_t word_mask(uint64_t word) { return uint64_t{0xff} << (8 * word); }

// Keeps contents apart that are equal, in the order in which they came.
class Contents {
 public:
  void add(const Buffer& content) {
    if (known_.insert(content).second) list_.push_back(content);
  }
  std::vector<Buffer> take() { return std::move(list_); }

 private:
  std::set<Buffer> known_;
  std::vector<Buffer> list_;
};

}  // namespace

void Hardware::apply(const Event& event) {
  if (event.grows) {
    durable_.resize(event.bytes);
    return;
  }
  if (event.atomic) return write_at_once(event);
  switch (event.kind) {
    case MediaEvent::Kind::kStore:
    case MediaEvent::Kind::kDmaDone:
    case MediaEvent::Kind::kNtCopy:
      return write(event);
    case MediaEvent::Kind::kFlush:
      return flush(event);
    case MediaEvent::Kind::kFence:
      if (model_ != Model::kLine) return;
      return settle(0, durable_.size(), [&](const Write& write) {
        return write.past_cache ? write.actor == event.actor
                                : (write.flushed_by >> event.actor & 1) != 0;
      });
    case MediaEvent::Kind::kSync:
      return settle(event.offset / kPageBytes * kPageBytes,
                    round_up(event.offset + event.bytes, kPageBytes),
                    [](const Write&) { return true; });
  }
}

Buffer Hardware::view() const {
  Buffer view = durable_;
  for (const auto& [line, writes] : pending_) {
    for (const Write& write : writes) put(write, write.bytes, view.data() + line);
  }
  return view;
}

bool Hardware::flush_matters(const Event& event) const {
  const auto end = pending_.lower_bound(event.offset + event.bytes);
  const Buffer seen = view();
  for (auto it = pending_.lower_bound(event.offset / kLineBytes * kLineBytes); it != end; ++it) {
    const auto line = static_cast<std::ptrdiff_t>(it->first);
    if (!std::equal(seen.begin() + line, seen.begin() + line + kLineBytes,
                    durable_.begin() + line)) {
      return true;
    }
  }
  return false;
}

void Hardware::put(const Write& write, uint64_t mask, std::byte* line) {
  mask &= write.bytes;
  for (uint64_t word = 0; word < kWords; ++word) {
    const uint64_t part = mask & word_mask(word);
    if (part == word_mask(word)) {
      std::memcpy(line + 8 * word, write.data.data() + 8 * word, 8);
      continue;
    }
    for (uint64_t at = 8 * word; part != 0 && at < 8 * word + 8; ++at) {
      if ((part >> at & 1) != 0) line[at] = write.data[at];
    }
  }
}

void Hardware::write_at_once(const Event& event) {
  const uint64_t end = event.offset + event.data.size();
  CHECK(end <= durable_.size());
  const auto pending = pending_.lower_bound(event.offset);
  CHECK(pending == pending_.end() || pending->first >= end);
  std::copy(event.data.begin(), event.data.end(), durable_.begin() + event.offset);
}

void Hardware::write(const Event& event) {
  CHECK(event.actor < 64 && event.offset + event.data.size() <= durable_.size());
  if (model_ == Model::kOrder) return write_at_once(event);
  const uint64_t end = event.offset + event.data.size();
  for (uint64_t at = event.offset; at < end;) {
    const uint64_t line = at / kLineBytes * kLineBytes;
    const uint64_t until = std::min(end, line + kLineBytes);
    const bool past_cache = event.kind == MediaEvent::Kind::kNtCopy && until - at == kLineBytes;
    const uint64_t bytes = ~uint64_t{0} >> (kLineBytes - (until - at)) << (at - line);
    Write write = {bytes, {}, event.actor, past_cache, 0, ++order_};
    const auto source = event.data.begin() + (at - event.offset);
    std::copy(source, source + (until - at), write.data.begin() + (at - line));
    pending_[line].push_back(write);
    at = until;
  }
}

void Hardware::flush(const Event& event) {
  if (event.bytes == 0) return;
  const auto end = pending_.lower_bound(event.offset + event.bytes);
  auto it = pending_.lower_bound(event.offset / kLineBytes * kLineBytes);
  for (; it != end; ++it) {
    for (Write& write : it->second) write.flushed_by |= uint64_t{1} << event.actor;
  }
}

// Makes the writes durable that `is_durable` says, of lines in [begin, end). What older ones wrote
// to the same bytes cannot come after.
template <typename IsDurable>
void Hardware::settle(uint64_t begin, uint64_t end, IsDurable is_durable) {
  for (auto it = pending_.lower_bound(begin); it != pending_.end() && it->first < end;) {
    auto& [line, writes] = *it;
    for (Write& write : writes) {
      if (!is_durable(write)) continue;
      put(write, write.bytes, durable_.data() + line);
      for (Write* older = writes.data(); older != &write; ++older) older->bytes &= ~write.bytes;
    }
    std::erase_if(writes, [&](const Write& w) { return w.bytes == 0 || is_durable(w); });
    it = writes.empty() ? pending_.erase(it) : std::next(it);
  }
}

// The pending writes by units of so many bytes; on lines, long rows of units are joined.
std::vector<Hardware::Run> Hardware::runs(uint64_t unit) const {
  std::vector<Run> rows;
  for (const auto& [line, writes] : pending_) {
    const uint64_t begin = line / unit * unit;
    const bool goes_on = !rows.empty() && (unit == kLineBytes ? rows.back().end == begin
                                                              : rows.back().begin == begin);
    if (!goes_on) rows.push_back({begin, begin, {}});
    rows.back().end = begin + unit;
    for (const Write& write : writes) rows.back().writes.emplace_back(line, &write);
  }
  std::vector<Run> runs;
  for (Run& row : rows) {
    std::ranges::sort(row.writes, {}, [](const auto& w) { return w.second->order; });
    if (unit != kLineBytes || row.end - row.begin >= kGroupLines * kLineBytes) {
      runs.push_back(std::move(row));
      continue;
    }
    for (uint64_t line = row.begin; line < row.end; line += kLineBytes) {
      Run one = {line, line + kLineBytes, {}};
      std::ranges::copy_if(row.writes, std::back_inserter(one.writes),
                           [&](const auto& write) { return write.first == line; });
      runs.push_back(std::move(one));
    }
  }
  return runs;
}

Buffer Hardware::durable_at(const Run& run) const {
  return Buffer(durable_.begin() + run.begin,
                durable_.begin() + std::min(run.end, durable_.size()));
}

std::vector<ImagePiece> Hardware::pieces(const Event* next, uint64_t seed) const {
  std::mt19937_64 random(seed);
  std::vector<ImagePiece> pieces;
  if (model_ == Model::kOrder && next != nullptr && next->tears()) {
    pieces.push_back(prefixes(*next));
  }
  for (const Run& run : runs(model_ == Model::kPage ? kSectorBytes : kLineBytes)) {
    if (model_ == Model::kPage) {
      pieces.push_back(snapshots(run, &random));
    } else if (run.end - run.begin == kLineBytes) {
      pieces.push_back(every_way(run, &random));
    } else {
      pieces.push_back(some_ways(run, &random));
    }
  }
  // What would change nothing is no choice.
  std::erase_if(pieces, [](const ImagePiece& piece) { return piece.contents.size() < 2; });
  return pieces;
}

// One line: a prefix of its cached stores and any words of the next, any words stored past the
// cache.
ImagePiece Hardware::every_way(const Run& run, std::mt19937_64* random) const {
  const Buffer durable = durable_at(run);
  Contents contents;
  contents.add(durable);
  Buffer all = durable;
  uint64_t cached = 0;
  for (const auto& [line, write] : run.writes) {
    put(*write, ~uint64_t{0}, all.data());
    cached += write->past_cache ? 0 : 1;
  }
  contents.add(all);
  for (uint64_t kept = 0; kept <= cached; ++kept) {
    const auto add = [&](auto choose) {
      Buffer content = durable;
      uint64_t stores = 0;  // cached ones so far
      for (const auto& [line, write] : run.writes) {
        const uint64_t nth = write->past_cache ? kept : stores++;
        if (nth < kept) put(*write, ~uint64_t{0}, content.data());
        for (uint64_t word = 0; nth == kept && word < kWords; ++word) {
          if ((write->bytes & word_mask(word)) != 0 && choose()) {
            put(*write, word_mask(word), content.data());
          }
        }
      }
      contents.add(content);
    };
    uint64_t bits = 0;
    add([&] { return ++bits, false; });
    for (uint64_t i = 0; i < uint64_t{1} << std::min(bits, kChoiceBitsMax); ++i) {
      uint64_t choice = bits <= kChoiceBitsMax ? i : (*random)();
      add([&] { return std::exchange(choice, choice >> 1) & 1; });
    }
  }
  return {run.begin, contents.take()};
}

// Many lines: none, all, the first half, one word missing, any words.
ImagePiece Hardware::some_ways(const Run& run, std::mt19937_64* random) const {
  Contents contents;
  const auto add = [&](auto kept) {
    Buffer content = durable_at(run);
    for (const auto& [line, write] : run.writes) {
      for (uint64_t word = 0; word < kWords; ++word) {
        if (!kept(line + 8 * word)) continue;
        put(*write, word_mask(word), content.data() + (line - run.begin));
      }
    }
    contents.add(content);
  };
  const uint64_t missing = run.begin + (*random)() % ((run.end - run.begin) / 8) * 8;
  add([](uint64_t) { return false; });
  add([](uint64_t) { return true; });
  add([&](uint64_t at) { return at < (run.begin + run.end) / 2; });
  add([&](uint64_t at) { return at != missing; });
  add([&](uint64_t) { return (*random)() % 2 == 0; });
  return {run.begin, contents.take()};
}

// The next write up to any of its words.
ImagePiece Hardware::prefixes(const Event& next) const {
  Contents contents;
  const auto begin = durable_.begin() + next.offset;
  Buffer content(begin, begin + next.data.size());
  contents.add(content);
  contents.add(next.data);
  for (uint64_t at = 0; at < next.data.size(); at = next_word(at)) {
    const uint64_t end = std::min<uint64_t>(next_word(at), next.data.size());
    std::copy(next.data.begin() + at, next.data.begin() + end, content.begin() + at);
    contents.add(content);
  }
  return {next.offset, contents.take()};
}

// A sector: as it was after each of its writes, or within one.
ImagePiece Hardware::snapshots(const Run& run, std::mt19937_64* random) const {
  Contents contents;
  Buffer content = durable_at(run);
  contents.add(content);
  Buffer all = content;
  for (const auto& [line, write] : run.writes) {
    put(*write, ~uint64_t{0}, all.data() + (line - run.begin));
  }
  contents.add(all);
  const bool short_row = run.writes.size() < kGroupLines;
  for (const auto& [line, write] : run.writes) {
    std::byte* target = content.data() + (line - run.begin);
    const uint64_t chosen = (*random)() % kWords;
    if (write->past_cache) {  // its words leave in any order
      const Buffer before = content;
      put(*write, ~word_mask(chosen), target);
      contents.add(content);
      std::ranges::copy(before, content.begin());
    }
    // Torn at each word for slots and the like; in one place for what is part of a long copy.
    for (uint64_t word = 0; word < kWords; ++word) {
      put(*write, word_mask(word), target);
      if (short_row || word == chosen) contents.add(content);
    }
    contents.add(content);
  }
  return {run.begin, contents.take()};
}

}  // namespace lightckpt
