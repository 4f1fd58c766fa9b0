// StoreLock. Goal: one writer, in this process or any; readers that keep their version from being
// retired; and nothing that outlives a process or is lost because some other handle was closed.
// Method: handles in one process, and forked children that say when they hold what; record locks
// themselves are asked for by a child, because a process never conflicts with itself.
#include "lock.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <fstream>

#include "helpers.h"

namespace lightckpt {
namespace {

constexpr uint32_t kSlot = 3;

struct Locks : testing::Test {
  std::string held_by(pid_t pid) { return "process " + std::to_string(pid); }
  // Runs in another process: can it become the writer?
  bool another_process_can_write() {
    Child child([&](Child&) {
      StoreLock lock;
      return lock.acquire(store, true).ok() ? 1 : 0;
    });
    return child.exit_code() == 1;
  }

  TempFolder folder;
  std::string store = folder.file("store");
};

TEST_F(Locks, a_second_writer_in_the_process_is_refused_with_its_pid) {
  StoreLock first, second;
  ASSERT_TRUE(is_ok(first.acquire(store, true)));
  const std::string pid = "pid " + std::to_string(getpid());
  EXPECT_TRUE(fails(second.acquire(store, true), Code::kBusy, pid));
  first.release();
  EXPECT_TRUE(is_ok(second.acquire(store, true)));
}

TEST_F(Locks, a_writer_in_another_process_is_refused_with_the_holders_pid) {
  StoreLock lock;
  ASSERT_TRUE(is_ok(lock.acquire(store, true)));
  const pid_t holder = getpid();
  Child child([&](Child&) {
    StoreLock other;
    const Status status = other.acquire(store, true);
    return fails(status, Code::kBusy, held_by(holder)) ? 0 : 1;
  });
  EXPECT_EQ(child.exit_code(), 0);
  lock.release();
  EXPECT_TRUE(another_process_can_write());
}

TEST_F(Locks, a_writer_that_was_killed_holds_nothing) {
  Child child([&](Child& self) {
    StoreLock lock;
    if (!lock.acquire(store, true).ok() || !lock.pin(kSlot).ok()) return 1;
    self.signal();
    self.hear();
    return 0;
  });
  ASSERT_TRUE(child.hear());
  StoreLock lock;
  EXPECT_TRUE(fails(lock.acquire(store, true), Code::kBusy, held_by(child.pid())));
  child.kill();
  EXPECT_EQ(child.exit_code(), -SIGKILL);
  ASSERT_TRUE(is_ok(lock.acquire(store, true)));
  EXPECT_FALSE(lock.pinned_elsewhere(kSlot));
}

TEST_F(Locks, a_forked_child_does_not_keep_the_lock) {
  auto lock = std::make_unique<StoreLock>();
  ASSERT_TRUE(is_ok(lock->acquire(store, true)));
  Child orphan([](Child& self) {
    self.hear();  // lives on with all of its parent's descriptors
    return 0;
  });
  lock.reset();
  EXPECT_TRUE(another_process_can_write());
  orphan.signal();
  EXPECT_EQ(orphan.exit_code(), 0);
}

TEST_F(Locks, a_forked_child_that_ends_leaves_its_parents_locks_alone) {
  StoreLock lock;
  ASSERT_TRUE(is_ok(lock.acquire(store, true)));
  ASSERT_TRUE(is_ok(lock.pin(kSlot)));
  Child child([&](Child&) {
    lock.release();  // what a destructor in the child would do
    return 0;
  });
  EXPECT_EQ(child.exit_code(), 0);
  EXPECT_FALSE(another_process_can_write());
  Child other([&](Child&) {
    StoreLock reader;
    return reader.acquire(store, false).ok() && reader.pinned_elsewhere(kSlot) ? 0 : 1;
  });
  EXPECT_EQ(other.exit_code(), 0);
}

TEST_F(Locks, a_forked_child_may_read_what_its_parent_writes) {
  StoreLock lock;
  ASSERT_TRUE(is_ok(lock.acquire(store, true)));
  Child child([&](Child& self) {
    StoreLock reader;
    if (!reader.acquire(store, false).ok() || !reader.pin(kSlot).ok()) return 1;
    self.signal();
    return self.hear() ? 0 : 2;
  });
  ASSERT_TRUE(child.hear());
  EXPECT_TRUE(lock.pinned_elsewhere(kSlot));
  child.signal();
  EXPECT_EQ(child.exit_code(), 0);
  EXPECT_FALSE(lock.pinned_elsewhere(kSlot));
}

// The trap of record locks: closing any descriptor of the file would drop all of them.
TEST_F(Locks, the_writers_lock_survives_readers_that_come_and_go) {
  StoreLock writer;
  ASSERT_TRUE(is_ok(writer.acquire(store, true)));
  for (int i = 0; i < 3; ++i) {
    StoreLock reader;
    ASSERT_TRUE(is_ok(reader.acquire(store, false)));
    ASSERT_TRUE(is_ok(reader.pin(kSlot)));
    reader.release();
    EXPECT_FALSE(another_process_can_write()) << "after reader " << i;
  }
  StoreLock refused;
  EXPECT_TRUE(fails(refused.acquire(store, true), Code::kBusy));
  refused.release();
  EXPECT_FALSE(another_process_can_write()) << "after a writer that was refused";
}

TEST_F(Locks, a_pin_lasts_until_the_last_reader_of_the_slot_lets_go) {
  StoreLock writer, first, second;
  ASSERT_TRUE(is_ok(writer.acquire(store, true)));
  ASSERT_TRUE(is_ok(first.acquire(store, false)));
  ASSERT_TRUE(is_ok(second.acquire(store, false)));
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
  ASSERT_TRUE(is_ok(writer.acquire(store, true)));
  ASSERT_TRUE(is_ok(reader.acquire(store, false)));
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

TEST_F(Locks, a_slot_pinned_by_another_process_cannot_be_sealed) {
  StoreLock writer;
  ASSERT_TRUE(is_ok(writer.acquire(store, true)));
  Child child([&](Child& self) {
    StoreLock reader;
    if (!reader.acquire(store, false).ok() || !reader.pin(kSlot).ok()) return 1;
    self.signal();
    if (!self.hear()) return 2;
    reader.unpin(kSlot);
    self.signal();
    return self.hear() ? 0 : 3;
  });
  ASSERT_TRUE(child.hear());
  EXPECT_FALSE(writer.try_seal(kSlot));
  child.signal();
  ASSERT_TRUE(child.hear());
  EXPECT_TRUE(writer.try_seal(kSlot)) << "it let go";
  child.signal();
  EXPECT_EQ(child.exit_code(), 0);
}

TEST_F(Locks, nobody_pins_a_sealed_slot) {
  StoreLock writer, reader;
  ASSERT_TRUE(is_ok(writer.acquire(store, true)));
  ASSERT_TRUE(is_ok(reader.acquire(store, false)));
  ASSERT_TRUE(writer.try_seal(kSlot));
  EXPECT_TRUE(fails(reader.pin(kSlot), Code::kBusy, "being retired"));
  EXPECT_FALSE(reader.pinned_here(kSlot));
  const auto pin_in_a_child = [&] {
    Child child([&](Child&) {
      StoreLock other;
      if (!other.acquire(store, false).ok()) return 1;
      const Status status = other.pin(kSlot);
      return status.ok() ? 2 : status.code() == Code::kBusy ? 3 : 4;
    });
    return child.exit_code();
  };
  EXPECT_EQ(pin_in_a_child(), 3) << "3: busy";
  writer.unseal(kSlot);
  EXPECT_EQ(pin_in_a_child(), 2) << "2: pinned";
  EXPECT_TRUE(is_ok(reader.pin(kSlot)));
}

TEST_F(Locks, all_pins_of_a_handle_can_be_taken_off_and_counted) {
  StoreLock writer, reader;
  ASSERT_TRUE(is_ok(writer.acquire(store, true)));
  ASSERT_TRUE(is_ok(reader.acquire(store, false)));
  for (StoreLock* holder : {&writer, &writer, &reader}) ASSERT_TRUE(is_ok(holder->pin(kSlot)));
  EXPECT_EQ(writer.unpin_all(kSlot), 2u);
  EXPECT_EQ(writer.unpin_all(kSlot), 0u);
  EXPECT_TRUE(writer.pinned_elsewhere(kSlot));
}

TEST_F(Locks, two_links_to_one_store_have_one_lock) {
  std::ofstream(store).close();
  const std::string link = folder.file("link");
  std::filesystem::create_symlink(store, link);
  StoreLock first, second;
  ASSERT_TRUE(is_ok(first.acquire(store, true)));
  EXPECT_TRUE(fails(second.acquire(link, true), Code::kBusy));
}

TEST_F(Locks, a_released_handle_pins_nothing) {
  StoreLock writer;
  ASSERT_TRUE(is_ok(writer.acquire(store, true)));
  {
    StoreLock reader;
    ASSERT_TRUE(is_ok(reader.acquire(store, false)));
    for (uint32_t slot : {0u, kSlot, 63u}) ASSERT_TRUE(is_ok(reader.pin(slot)));
    EXPECT_TRUE(writer.pinned_elsewhere(63));
  }
  for (uint32_t slot : {0u, kSlot, 63u}) EXPECT_TRUE(writer.try_seal(slot));
}

TEST_F(Locks, a_folder_without_room_for_a_lock_file_says_so_to_a_writer) {
  StoreLock lock;
  const std::string nowhere = folder.file("missing/store");
  EXPECT_TRUE(fails(lock.acquire(nowhere, true), Code::kNotFound, "lock file"));
  EXPECT_TRUE(fails(lock.acquire(nowhere, false), Code::kNotFound, "lock file"));
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
}

}  // namespace
}  // namespace lightckpt
