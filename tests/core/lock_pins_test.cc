// StoreLock, the readers' side. Goal: readers keep their version from being retired, as long as
// they hold it and no longer, and cannot do more than that. Method: handles in one process, and
// pins as readers of earlier releases have them.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lock_helpers.h"

namespace lightckpt {
namespace {

TEST_F(Locks, a_reader_of_an_earlier_release_pins_its_slot) {
  StoreLock writer;
  ASSERT_TRUE(is_ok(write(&writer)));
  const Foreign file(store + ".lock", O_RDONLY);
  ASSERT_TRUE(file.lock(F_RDLCK, F_OFD_SETLK, 1 + kSlot, 1));
  EXPECT_TRUE(writer.pinned_elsewhere(kSlot));
  EXPECT_FALSE(writer.try_seal(kSlot));
  ASSERT_TRUE(file.lock(F_UNLCK, F_OFD_SETLK, 1 + kSlot, 1));
  EXPECT_TRUE(writer.try_seal(kSlot));
  EXPECT_FALSE(file.lock(F_RDLCK, F_OFD_SETLK, 1 + kSlot, 1));
}

TEST_F(Locks, a_pin_lasts_until_the_last_reader_of_the_slot_lets_go) {
  StoreLock writer, first, second;
  ASSERT_TRUE(is_ok(write(&writer)));
  ASSERT_TRUE(is_ok(first.open(store, false)));
  ASSERT_TRUE(is_ok(second.open(store, false)));
  ASSERT_TRUE(is_ok(first.pin(kSlot)));
  ASSERT_TRUE(is_ok(first.pin(kSlot)));
  ASSERT_TRUE(is_ok(second.pin(kSlot)));
  EXPECT_TRUE(writer.pinned_elsewhere(kSlot));
  EXPECT_FALSE(writer.pinned_here(kSlot));
  first.unpin(kSlot);
  EXPECT_TRUE(first.pinned_here(kSlot)) << "it pinned twice";
  first.unpin(kSlot);
  EXPECT_FALSE(first.pinned_here(kSlot));
  first.unpin(kSlot);  // once too often takes nothing from others
  EXPECT_TRUE(first.pinned_elsewhere(kSlot));
  EXPECT_FALSE(second.pinned_elsewhere(kSlot)) << "its own pin is not elsewhere";
  EXPECT_FALSE(writer.try_seal(kSlot));
  second.unpin(kSlot);
  EXPECT_FALSE(writer.pinned_elsewhere(kSlot));
  EXPECT_TRUE(writer.try_seal(kSlot));
}

TEST_F(Locks, a_pinned_slot_cannot_be_sealed_and_its_neighbours_can) {
  StoreLock writer, reader;
  ASSERT_TRUE(is_ok(write(&writer)));
  ASSERT_TRUE(is_ok(reader.open(store, false)));
  for (StoreLock* holder : {&writer, &reader}) {
    ASSERT_TRUE(is_ok(holder->pin(kSlot)));
    EXPECT_FALSE(writer.try_seal(kSlot));
    for (uint32_t beside : {kSlot - 1, kSlot + 1}) {
      EXPECT_TRUE(writer.try_seal(beside));
      writer.unseal(beside);
    }
    holder->unpin(kSlot);
    EXPECT_TRUE(writer.try_seal(kSlot));
    writer.unseal(kSlot);
  }
}

TEST_F(Locks, nobody_pins_a_sealed_slot) {
  StoreLock writer, reader;
  ASSERT_TRUE(is_ok(write(&writer)));
  ASSERT_TRUE(is_ok(reader.open(store, false)));
  ASSERT_TRUE(writer.try_seal(kSlot));
  for (StoreLock* holder : {&writer, &reader}) {
    EXPECT_TRUE(fails(holder->pin(kSlot), Code::kBusy, "being retired"));
    EXPECT_FALSE(holder->pinned_here(kSlot));
  }
  EXPECT_FALSE(reader.pinned_elsewhere(kSlot)) << "sealed is not read";
  writer.unseal(kSlot);
  EXPECT_TRUE(is_ok(reader.pin(kSlot)));
}

TEST_F(Locks, all_pins_of_a_handle_can_be_taken_off_and_counted) {
  StoreLock writer, reader;
  ASSERT_TRUE(is_ok(write(&writer)));
  ASSERT_TRUE(is_ok(reader.open(store, false)));
  for (StoreLock* holder : {&writer, &writer, &reader}) ASSERT_TRUE(is_ok(holder->pin(kSlot)));
  EXPECT_EQ(writer.unpin_all(kSlot), 2u);
  EXPECT_EQ(writer.unpin_all(kSlot), 0u);
  EXPECT_TRUE(writer.pinned_elsewhere(kSlot));
}

TEST_F(Locks, a_released_handle_pins_nothing_and_has_no_descriptor) {
  const auto descriptors = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = descriptors();
  StoreLock writer;
  ASSERT_TRUE(is_ok(write(&writer)));
  {
    StoreLock reader;
    ASSERT_TRUE(is_ok(reader.open(store, false)));
    for (uint32_t slot : {0u, kSlot, 63u}) ASSERT_TRUE(is_ok(reader.pin(slot)));
    EXPECT_TRUE(writer.pinned_elsewhere(63));
  }
  for (uint32_t slot : {0u, kSlot, 63u}) EXPECT_TRUE(writer.try_seal(slot));
  writer.release();
  EXPECT_EQ(descriptors(), before);
}

// Stores on heap media have no path, and so nothing to share a lock through.
TEST(LockWithoutFile, pins_hold_within_the_handle) {
  StoreLock lock;
  ASSERT_TRUE(is_ok(lock.pin(kSlot)));
  EXPECT_TRUE(lock.pinned_here(kSlot));
  EXPECT_FALSE(lock.pinned_elsewhere(kSlot));
  EXPECT_FALSE(lock.try_seal(kSlot));
  lock.unpin(kSlot);
  EXPECT_TRUE(lock.try_seal(kSlot));
  EXPECT_TRUE(is_ok(lock.check()));
}

}  // namespace
}  // namespace lightckpt
