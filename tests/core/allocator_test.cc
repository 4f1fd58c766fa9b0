// Allocator. Goal: what it hands out is free, aligned and the first that fits, so that keep + 1
// areas of one size take turns in the same places. Method: compare with a model that marks every
// unit of a small space, over random sequences; the properties that the store leans on stand alone.
#include "allocator.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace lightckpt {
namespace {

// One mark per unit of the space; a fit is looked for unit by unit.
class Model {
 public:
  Model(uint64_t begin, uint64_t end) : begin_(begin), end_(end), used_(kUnits, false) {}

  void use(uint64_t offset, uint64_t bytes) {
    for (uint64_t i = offset; i < offset + bytes; ++i) used_[i] = true;
  }
  std::optional<uint64_t> first_fit(uint64_t bytes, uint64_t align) const {
    for (uint64_t at = begin_; at + bytes <= end_; ++at) {
      if (at % align == 0 && is_free(at, bytes)) return at;
    }
    return std::nullopt;
  }
  uint64_t free_bytes() const {
    uint64_t count = 0;
    for (uint64_t i = begin_; i < end_; ++i) count += !used_[i];
    return count;
  }
  void extend(uint64_t end) { end_ = std::max(end_, end); }

 private:
  static constexpr size_t kUnits = 2000;

  bool is_free(uint64_t offset, uint64_t bytes) const {
    for (uint64_t i = offset; i < offset + bytes; ++i) {
      if (used_[i]) return false;
    }
    return true;
  }

  uint64_t begin_;
  uint64_t end_;
  std::vector<bool> used_;
};

TEST(Allocator, takes_the_first_gap_that_fits) {
  Allocator allocator(100, 1000);
  allocator.use(200, 100);
  allocator.use(350, 100);
  EXPECT_EQ(allocator.take(60, 1), 100u);
  EXPECT_EQ(allocator.take(50, 1), 300u);   // too large for [160, 200)
  EXPECT_EQ(allocator.take(40, 1), 160u);   // exactly what is left there
  EXPECT_EQ(allocator.take(550, 1), 450u);  // to the end
  EXPECT_EQ(allocator.take(1, 1), std::nullopt);
  EXPECT_EQ(allocator.free_bytes(), 0u);
}

TEST(Allocator, what_it_hands_out_is_aligned) {
  Allocator allocator(20, 10'000);
  EXPECT_EQ(allocator.take(10, 64), 64u);
  EXPECT_EQ(allocator.take(10, 64), 128u);
  EXPECT_EQ(allocator.take(44, 1), 20u);
  EXPECT_EQ(allocator.take(1, 4096), 4096u);
}

TEST(Allocator, areas_of_one_size_take_turns_in_the_same_places) {
  constexpr uint64_t kArea = 4096;
  for (uint64_t keep : {1, 2, 3}) {
    std::vector<uint64_t> kept;
    for (int turn = 0; turn < 20; ++turn) {
      Allocator allocator(kArea, 100 * kArea);  // made anew from what is reached, as the store does
      for (uint64_t offset : kept) allocator.use(offset, kArea);
      const auto offset = allocator.take(kArea, kArea);
      ASSERT_TRUE(offset.has_value());
      EXPECT_LE(*offset, (keep + 1) * kArea);
      kept.push_back(*offset);
      if (kept.size() > keep) kept.erase(kept.begin());
    }
  }
}

TEST(Allocator, the_end_needed_is_enough_and_no_more) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 random(seed);
    Allocator allocator(10, 200);
    allocator.use(10 + random() % 150, random() % 60);
    const uint64_t bytes = 1 + random() % 300, align = uint64_t{1} << random() % 6;
    Allocator tried = allocator;
    if (tried.take(bytes, align)) continue;
    const uint64_t end = allocator.end_needed(bytes, align);
    Allocator short_of_one = allocator, enough = allocator;
    short_of_one.extend(end - 1);
    enough.extend(end);
    EXPECT_EQ(short_of_one.take(bytes, align), std::nullopt) << "seed " << seed;
    EXPECT_EQ(enough.take(bytes, align), end - bytes) << "seed " << seed;
  }
}

TEST(Allocator, random_sequences_follow_the_model) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    const uint64_t begin = random() % 50, end = begin + 1 + random() % 400;
    Allocator allocator(begin, end);
    Model model(begin, end);
    for (int i = 0; i < 30; ++i) {
      if (random() % 4 == 0) {
        const uint64_t offset = random() % (end + 20), bytes = random() % 40;
        allocator.use(offset, bytes);
        model.use(offset, bytes);
      } else if (random() % 8 == 0) {
        const uint64_t further = end + random() % 100;
        allocator.extend(further);
        model.extend(further);
      } else {
        const uint64_t bytes = 1 + random() % 60, align = uint64_t{1} << random() % 7;
        const auto expected = model.first_fit(bytes, align);
        ASSERT_EQ(allocator.take(bytes, align), expected) << "seed " << seed << ", turn " << i;
        if (expected) model.use(*expected, bytes);
      }
      ASSERT_EQ(allocator.free_bytes(), model.free_bytes()) << "seed " << seed << ", turn " << i;
    }
  }
}

}  // namespace
}  // namespace lightckpt
