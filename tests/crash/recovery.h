// Recovery from an image, and what must hold of it. All of it happens in one piece of memory, and
// what a check changes there it puts back: an image costs no copy of the store.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "atomic_catalog.h"
#include "store_helpers.h"
#include "trace.h"

namespace lightckpt {

inline constexpr uint64_t kStoreBytesMax = 128 * 1024;
inline constexpr uint32_t kLifeSlots = 6;

// A state with what its record must hold.
struct Known {
  State state;
  std::vector<uint32_t> table;

  static Known of(State state);
};
using Knowns = std::map<uint64_t, Known>;  // by step

// What holds at any crash from an event on, until the next promise. Versions go by their steps.
struct Promise {
  size_t from = 0;                 // the number of events before it
  std::vector<uint64_t> listed;    // these are there
  std::vector<uint64_t> possible;  // and nothing but these
  std::set<uint64_t> latest;       // the newest of them is one of these; 0: there is none
};

class Recovery {
 public:
  Recovery(const Knowns& knowns, uint32_t keep, CatalogKind catalog);

  // The memory that images are built in, of which the media has the first bytes.
  std::byte* memory() { return memory_.get(); }
  void set_size(uint64_t bytes) { bytes_ = bytes; }

  // What is wrong with the image in memory, or nothing.
  std::string broken(const Promise& promise);
  // The store goes on from the image: one more version, and a reopening.
  std::string broken_future();

 private:
  using List = std::vector<Version>;
  Status open(MediaTrace* trace, std::unique_ptr<Store>* store);
  uint64_t orphans() const;
  std::string wrong(Store* store, const Version& version, const Known& known) const;
  std::string wrong_list(Store* store, const List& versions, const Promise& promise) const;
  std::string wrong_space(Store* store, const List& versions) const;

  const Knowns& knowns_;
  uint32_t keep_;
  CatalogKind catalog_;
  Known next_;  // what the store goes on with
  Pages memory_{kStoreBytesMax};
  uint64_t bytes_ = 0;
};

}  // namespace lightckpt
