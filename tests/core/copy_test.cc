// Non-temporal copies. Goal: the bytes of memcpy and the checksum of crc32c, at any length and any
// alignment of source and target, and not one byte beside them. Method: copy into the middle of a
// target full of a guard value, and compare all of it; short lengths exhaustively, long ones by
// seed, and the lengths around a block's edges one by one.
#include "copy.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "crc32c.h"
#include "helpers.h"

namespace lightckpt {
namespace {

constexpr size_t kGuardBytes = 64;
constexpr std::byte kGuard{0xa5};

// Lines up a buffer, so that the misalignments asked for are the real ones.
class Target {
 public:
  explicit Target(size_t bytes) : raw_(bytes + 3 * kGuardBytes) {
    const auto address = reinterpret_cast<uintptr_t>(raw_.data());
    base_ = raw_.data() + (kLineBytes - address % kLineBytes) % kLineBytes;
    bytes_ = bytes;
  }
  std::byte* at(size_t misalignment) { return base_ + kGuardBytes + misalignment; }
  void reset() { std::ranges::fill(raw_, kGuard); }
  // Only [at(misalignment), + bytes) differs from the guard value, and it is `source`.
  bool holds(size_t misalignment, const std::byte* source, size_t bytes) {
    const std::byte* begin = at(misalignment);
    const std::byte* end = begin + bytes;
    const auto is_guard = [](std::byte byte) { return byte == kGuard; };
    return std::equal(begin, end, source) &&
           std::all_of<const std::byte*>(base_, begin, is_guard) &&
           std::all_of<const std::byte*>(end, base_ + kGuardBytes + bytes_, is_guard);
  }

 private:
  Buffer raw_;
  std::byte* base_;
  size_t bytes_;
};

// Both copies once; an empty string if all is as it should be.
std::string difference(Target* target, const std::byte* source, size_t to, size_t bytes) {
  const auto where = [&](const char* what) {
    return std::string(what) + ": " + std::to_string(bytes) + " bytes from alignment " +
           std::to_string(reinterpret_cast<uintptr_t>(source) % kLineBytes) + " to " +
           std::to_string(to);
  };
  target->reset();
  copy_nt(target->at(to), source, bytes);
  store_fence();
  if (!target->holds(to, source, bytes)) return where("copy_nt");
  target->reset();
  const uint32_t crc = copy_nt_crc(target->at(to), source, bytes);
  store_fence();
  if (!target->holds(to, source, bytes)) return where("copy_nt_crc");
  if (crc != crc32c_portable(0, source, bytes)) return where("checksum of copy_nt_crc");
  return "";
}

TEST(Copy, short_copies_are_exact_at_every_alignment) {
  constexpr size_t kBytesMax = 200;
  const Buffer source = random_bytes(kBytesMax + 64, 1);
  Target target(kBytesMax + 64);
  for (size_t to = 0; to < kLineBytes; ++to) {
    for (size_t from : {0, 1, 7, 8, 15, 32, 33, 63}) {
      for (size_t bytes = 0; bytes <= kBytesMax; ++bytes) {
        ASSERT_EQ(difference(&target, source.data() + from, to, bytes), "");
      }
    }
  }
}

TEST(Copy, lengths_around_a_block_are_exact) {
  constexpr size_t kBlockBytes = 256;
  const Buffer source = random_bytes(4 * kBlockBytes, 2);
  Target target(4 * kBlockBytes);
  for (size_t blocks : {1, 2, 3}) {
    for (size_t to : {0, 1, 63}) {
      for (size_t bytes = blocks * kBlockBytes - 70; bytes <= blocks * kBlockBytes + 70; ++bytes) {
        ASSERT_EQ(difference(&target, source.data() + to % 3, to, bytes), "");
      }
    }
  }
}

TEST(Copy, random_copies_are_exact) {
  constexpr size_t kBytesMax = 100'000;
  const Buffer source = random_bytes(kBytesMax + 64, 3);
  Target target(kBytesMax + 64);
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const size_t bytes = random() % kBytesMax, from = random() % 64, to = random() % 64;
    ASSERT_EQ(difference(&target, source.data() + from, to, bytes), "") << "seed " << seed;
  }
}

TEST(Copy, a_sum_goes_on_where_another_ended) {
  const Buffer source = random_bytes(5000, 5);
  Buffer target(source.size());
  const uint32_t front = copy_nt_crc(target.data(), source.data(), 1234);
  const uint32_t whole =
      copy_nt_crc(target.data() + 1234, source.data() + 1234, source.size() - 1234, front);
  store_fence();
  EXPECT_EQ(whole, crc32c_portable(0, source.data(), source.size()));
  EXPECT_EQ(target, source);
}

TEST(Copy, write_back_changes_no_byte_by_any_method) {
  Target target(1000);
  const Buffer source = random_bytes(1000, 4);
  std::vector<FlushMethod> methods = {FlushMethod::kNone, FlushMethod::kMsync, best_flush_method()};
#if defined(__x86_64__)
  methods.push_back(FlushMethod::kClflush);
#endif
  for (FlushMethod method : methods) {
    for (size_t at : {0, 1, 63}) {
      for (size_t bytes : {0, 1, 64, 65, 900}) {
        target.reset();
        std::copy_n(source.data(), bytes, target.at(at));
        write_back(method, target.at(at), bytes);
        store_fence();
        EXPECT_TRUE(target.holds(at, source.data(), bytes)) << bytes << " bytes at " << at;
      }
    }
  }
}

#if defined(__x86_64__)
TEST(Copy, this_processor_can_write_back) { EXPECT_NE(best_flush_method(), FlushMethod::kNone); }
#endif

}  // namespace
}  // namespace lightckpt
