// Copies and checksums by each instruction set. Goal: every set gives the bytes of memcpy and the
// sum of the portable one, for any length, address and sum to go on from; and what is stored is
// what was summed, whoever edits the source meanwhile. Method: random cases by seed; a hook between
// any two loads, which changes what was just loaded and what comes next; and a thread that edits
// all the time. Sets that this processor lacks are skipped, and say so.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <span>
#include <thread>

#include "copy.h"
#include "crc32c.h"
#include "helpers.h"
#include "instruction_set.h"
#include "kernel_sets.h"

namespace lightckpt {
namespace {

constexpr std::byte kGuard{0xa5};
constexpr size_t kGuardBytes = 64;

// The source of the copy that runs now, for the hook, which has no other way to know it.
std::span<std::byte> edited;

// Changes the bytes that were just loaded, as a second look at them would show, and those around.
struct EditingHook {
  static void loaded(const std::byte* from, size_t bytes) {
    const auto at = static_cast<size_t>(from - edited.data());
    const size_t begin = at < 32 ? 0 : at - 32;
    const size_t end = std::min(edited.size(), at + bytes + 96);
    for (size_t i = begin; i < end; ++i) {
      edited[i] = static_cast<std::byte>(std::to_integer<size_t>(edited[i]) + 1 + i % 7);
    }
  }
};

constexpr std::array<Kernels, kInstructionSets> kEdited = kernel_sets::make_all<EditingHook>();

// What the loop must not be: it sums, and looks again to store.
template <typename Hook>
uint32_t copy_with_two_loads(std::byte* to, const std::byte* from, size_t bytes, uint32_t crc) {
  for (size_t at = 0; at < bytes; ++at) {
    crc = crc32c_portable(crc, from + at, 1);
    Hook::loaded(from + at, 1);
    to[at] = *static_cast<const volatile std::byte*>(from + at);
  }
  return crc;
}

// Does `copy` store what it sums while the hook edits the source? An empty string if it does.
std::string difference_under_edits(Kernel copy, size_t bytes, size_t to, size_t from) {
  Buffer source = random_bytes(from + bytes, bytes), target(kLineBytes + to + bytes, kGuard);
  edited = source;
  std::byte* const stored = target.data() + to;
  const uint32_t crc = copy(stored, source.data() + from, bytes, 7);
  store_fence();
  if (crc == crc32c_portable(7, stored, bytes)) return "";
  return std::to_string(bytes) + " bytes from " + std::to_string(from) + " to " +
         std::to_string(to);
}

class Set : public testing::TestWithParam<InstructionSet> {
 protected:
  void SetUp() override {
    if (!has(CpuFeatures::of_this_cpu(), GetParam())) {
      GTEST_SKIP() << "this processor does not have " << name_of(GetParam());
    }
  }
};

TEST_P(Set, agrees_with_the_portable_one_on_100000_random_cases) {
  constexpr size_t kBytesMax = 6000, kOffsets = 128;
  const Kernels& set = kernels_of(GetParam());
  const Buffer source = random_bytes(kBytesMax + kOffsets, 1);
  Buffer target(kBytesMax + kOffsets + 2 * kGuardBytes);
  std::mt19937_64 random(2);
  for (int i = 0; i < 100'000; ++i) {
    // Half of them short: there lie the edges.
    const size_t bytes = random() % (i % 2 == 0 ? 600 : kBytesMax);
    const size_t from = random() % kOffsets, to = random() % kOffsets;
    const auto seed = static_cast<uint32_t>(random());
    const std::byte* const begin = source.data() + from;
    const uint32_t crc = crc32c_portable(seed, begin, bytes);
    ASSERT_EQ(set.sum(nullptr, begin, bytes, seed), crc) << bytes << " bytes from " << from;
    if (i % 10 != 0) continue;  // what follows looks at the whole target
    for (Kernel copy : {set.copy, set.copy_sum}) {
      std::ranges::fill(target, kGuard);
      std::byte* const stored = target.data() + kGuardBytes + to;
      const uint32_t returned = copy(stored, begin, bytes, seed);
      store_fence();
      const std::string where = std::to_string(bytes) + " bytes from " + std::to_string(from) +
                                " to " + std::to_string(to);
      ASSERT_EQ(returned, copy == set.copy ? seed : crc) << where;
      ASSERT_TRUE(std::equal(stored, stored + bytes, begin)) << where;
      const auto is_guard = [](std::byte byte) { return byte == kGuard; };
      ASSERT_TRUE(std::all_of(target.data(), stored, is_guard)) << where;
      ASSERT_TRUE(std::all_of(stored + bytes, &target.back(), is_guard)) << where;
    }
  }
}

TEST_P(Set, stores_what_it_sums_when_the_source_is_edited_between_any_two_loads) {
  const Kernels& set = kEdited[static_cast<size_t>(GetParam())];
  for (size_t bytes = 0; bytes < 1200; ++bytes) {
    for (size_t to : {0, 1, 56, 63}) {
      ASSERT_EQ(difference_under_edits(set.copy_sum, bytes, to, bytes % 5), "");
    }
  }
}

// The editor is not watched by TSan: the race is what is tried here.
__attribute__((no_sanitize("thread"))) void edit(std::byte* bytes, size_t count,
                                                 const std::atomic<bool>& stop) {
  for (uint8_t value = 0; !stop; ++value) {
    for (size_t i = 0; i < count; i += 8) {
      *reinterpret_cast<volatile uint64_t*>(bytes + i) = value * 0x0101010101010101u;
    }
  }
}

TEST_P(Set, stores_what_it_sums_beside_a_thread_that_edits) {
  const Kernels& set = kernels_of(GetParam());
  constexpr size_t kBytes = 256 << 10;
  Buffer source(kBytes), target(kBytes + 1);
  std::atomic<bool> stop = false;
  std::thread editor(edit, source.data(), kBytes, std::cref(stop));
  size_t different = 0;
  for (int i = 0; i < 200; ++i) {
    std::byte* const stored = target.data() + i % 2;
    const uint32_t crc = set.copy_sum(stored, source.data(), kBytes, 0);
    store_fence();
    different += crc != crc32c(0, stored, kBytes);
  }
  stop = true;
  editor.join();
  EXPECT_EQ(different, 0u);
}

INSTANTIATE_TEST_SUITE_P(Each, Set,
                         testing::Values(InstructionSet::kVpclmul512, InstructionSet::kVpclmul256,
                                         InstructionSet::kPclmul, InstructionSet::kCrc32,
                                         InstructionSet::kPortable),
                         [](const auto& set) {
                           std::string name = name_of(set.param);
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

// The test of the test: a loop that looks twice is found.
TEST(Kernels, the_hook_finds_a_loop_that_loads_twice) {
  EXPECT_NE(difference_under_edits(copy_with_two_loads<EditingHook>, 100, 0, 0), "");
}

TEST(Kernels, the_widest_set_that_is_there_is_chosen) {
  CpuFeatures cpu;
  EXPECT_EQ(widest(cpu), InstructionSet::kPortable);
  cpu.avx2 = cpu.vpclmul = cpu.avx512 = true;  // without what sums the rest
  EXPECT_EQ(widest(cpu), InstructionSet::kPortable);
  cpu.sse42 = true;
  EXPECT_EQ(widest(cpu), InstructionSet::kCrc32);
  cpu.pclmul = true;
  EXPECT_EQ(widest(cpu), InstructionSet::kVpclmul512);
  cpu.avx512 = false;
  EXPECT_EQ(widest(cpu), InstructionSet::kVpclmul256);
  cpu.avx2 = false;
  EXPECT_EQ(widest(cpu), InstructionSet::kPclmul);
  cpu.avx2 = true, cpu.vpclmul = false;
  EXPECT_EQ(widest(cpu), InstructionSet::kPclmul);
  const InstructionSet here = widest(CpuFeatures::of_this_cpu());
  EXPECT_EQ(&kernels(), &kernels_of(here));
}

}  // namespace
}  // namespace lightckpt
