// The test of the test: each flush, fence, sync and drain of a history is left out, one at a time,
// as if its call were not in the source. Some image must then break a promise, or the barrier is of
// a place in the table of those that are not needed there.
#pragma once

#include <string>
#include <vector>

#include "life.h"

namespace lightckpt {

struct Mutation {
  std::string site;  // "commit: fence of slot"
  size_t first;      // the event from which the history differs
  History history;
};

// What the history would have been without one of its barriers: all of them, in order.
class Mutations {
 public:
  explicit Mutations(const History& history);
  size_t count() const { return barriers_.size(); }
  size_t idle() const { return idle_; }  // barriers that have nothing to wait for
  Mutation at(size_t index) const;

 private:
  struct Barrier {
    size_t event;
    bool drain;  // with all of its syncs
  };
  History without(size_t event, bool drain) const;

  const History& history_;
  std::vector<Barrier> barriers_;
  size_t idle_ = 0;
};

// The barriers that no image misses, and why.
struct NotNeeded {
  Model model;
  std::string scenario;  // any, if empty
  std::string site;
  std::string reason;
};
const std::vector<NotNeeded>& barriers_not_needed();

}  // namespace lightckpt
