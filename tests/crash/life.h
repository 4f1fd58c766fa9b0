// A life of a store under a real engine: the engine does, a recorder sees, and the life says what
// must hold at a crash from each event on.
#pragma once

#include <memory>
#include <vector>

#include "dma.h"
#include "engine.h"
#include "hardware.h"
#include "recovery.h"

namespace lightckpt {

// All that is needed to look for crashes of a life, or of several that follow one another.
struct History {
  Model model;
  uint32_t keep;
  CatalogKind catalog;
  Buffer initial;
  std::vector<Event> events;
  std::vector<Promise> promises;
  Knowns knowns;
  bool dma = false;  // extents are written by a device

  // A formatted store, of so many bytes, in which nothing has happened yet.
  static History of(Model model, uint32_t keep, uint64_t bytes, CatalogKind catalog);
  // What holds if the power goes when `at` events have happened: all promises of that moment.
  Promise promise_at(size_t at) const;
  // What holds if it goes within the event `at`.
  Promise promise_within(size_t at) const;
  // The memory that a process finds that starts after a kill at the end.
  Buffer view() const;
  // As if the process had been killed when `at` events had happened and, of a write that would have
  // come next, its first `torn` bytes.
  History killed_at(size_t at, uint64_t torn) const;
  // As if this image, one that a crash may leave, were all there is.
  History crashed(Buffer image) const {
    return {model, keep, catalog, std::move(image), {}, {}, knowns, dma};
  }
};

// From the opening of the store to its end; adds to the history what happens in between.
class Life {
 public:
  // On what the history leaves in memory; the one before it, if any, was killed.
  explicit Life(History* history);
  Life(const Life&) = delete;
  Life& operator=(const Life&) = delete;
  ~Life();

  void save(uint64_t step, const std::vector<uint64_t>& sizes, uint64_t host_bytes = 100);
  // A version is begun and written, and never committed.
  void drop(uint64_t step, const std::vector<uint64_t>& sizes);
  void rebase(uint64_t step);
  void pin(uint64_t step, bool pinned);
  const std::vector<uint64_t>& listed() const { return listed_; }  // newest first

 private:
  uint64_t latest() const { return listed_.empty() ? 0 : listed_.front(); }
  void play(int part, const std::string& call);
  void promise(std::vector<uint64_t> listed, std::vector<uint64_t> possible,
               std::set<uint64_t> latest_steps);
  std::vector<uint64_t> kept_by_begin();
  void begin(const State& state, const std::string& call);
  void write(const State& state, const std::string& call);
  Status wait(uint64_t batch);
  uint64_t version_of(uint64_t step);

  History* history_;
  size_t base_;  // events before this life
  int actors_;   // the first of its own
  Recorder recorder_;
  Pages memory_{kStoreBytesMax};
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Dma> dma_;
  std::vector<uint64_t> listed_;
  std::set<uint64_t> pinned_;
  Promise before_;  // what the life before it promised
  bool vouched_;    // has it committed, or found only what was acknowledged or is durable?
};

}  // namespace lightckpt
