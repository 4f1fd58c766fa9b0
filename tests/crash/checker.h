// Every image that a crash may leave of a history, put before recovery.
//
// Crashes just before each fence, sync and change of a catalog, where the media grows, wherever a
// call ends, and at the end: in between nothing becomes durable, so what may be left there may be
// left at the next of these as well. In the order model it is before and within each write. At each
// such point all combinations of what the pieces may hold are built if there are no more than
// `images_max`, else so many samples, among them: nothing got out, everything, everything but one
// piece, one piece alone.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "hardware.h"
#include "life.h"
#include "recovery.h"

namespace lightckpt {

struct Settings {
  uint64_t seed = 0;
  uint64_t images_max = 0;    // at one point
  uint64_t future_every = 0;  // every so many images, the store goes on from one; 0: never
  size_t from = 0;            // points before this event are left out
};

class Checker {
 public:
  // What is wrong with some image, or nothing; adds to `images` how many there were.
  static std::string first_broken(const History& history, const Settings& settings,
                                  uint64_t* images);

  using See = std::function<void(size_t at, const std::byte* memory, uint64_t bytes)>;
  // The same, and shows each image to `see`.
  static std::string first_broken(const History& history, const Settings& settings,
                                  uint64_t* images, const See& see);

 private:
  Checker(const History& history, const Settings& settings, const See& see);
  bool is_point(size_t at) const;
  std::string crash(size_t at);
  std::string all_images(size_t at, const Promise& promise);
  std::string some_images(size_t at, const Promise& promise, std::mt19937_64* random);
  void choose(size_t piece, size_t content);
  std::string examine(size_t at, const Promise& promise);

  const History& history_;
  const Settings& settings_;
  const See& see_;
  Hardware hardware_;
  Recovery recovery_;
  std::vector<ImagePiece> pieces_;
  std::vector<size_t> chosen_;  // which content of each piece is in memory
  uint64_t images_ = 0;
};

}  // namespace lightckpt
