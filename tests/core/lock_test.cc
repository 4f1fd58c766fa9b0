// StoreLock, the writer's side. Goal: one writer of a store, in this process or any, whatever the
// store is called; nothing that outlives a process, or is lost because some descriptor was closed.
// Method: handles in one process, and forked children that say when they hold what.
//
// Elsewhere: the lock file in lock_file_test.cc, readers' pins in lock_pins_test.cc, and whole
// stores in hold_test.cc.
#include "lock.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "lock_helpers.h"

namespace lightckpt {
namespace {

TEST_F(Locks, a_second_writer_in_the_process_is_refused) {
  StoreLock first, second;
  ASSERT_TRUE(is_ok(write(&first)));
  EXPECT_EQ(write(&second).code(), Code::kBusy);
  EXPECT_EQ(second.open(store, true).code(), Code::kBusy) << "by the store alone";
  EXPECT_EQ(second.holder_pid(), 0) << "such a lock names nobody";
  first.release();
  EXPECT_TRUE(is_ok(write(&second)));
}

TEST_F(Locks, a_writer_that_was_killed_holds_nothing) {
  Child child([&](Child& self) {
    StoreLock lock;
    if (!write(&lock).ok()) return 1;
    self.signal();
    self.hear();
    return 0;
  });
  ASSERT_TRUE(child.hear());
  StoreLock lock;
  EXPECT_EQ(write(&lock).code(), Code::kBusy);
  child.kill();
  EXPECT_EQ(child.exit_code(), -SIGKILL);
  EXPECT_TRUE(is_ok(write(&lock)));
}

TEST_F(Locks, a_forked_child_does_not_keep_the_lock) {
  auto lock = std::make_unique<StoreLock>();
  ASSERT_TRUE(is_ok(write(lock.get())));
  Child orphan([&](Child& self) {
    if (lock->is_open()) return 1;
    self.hear();  // lives on with all other descriptors of its parent
    return 0;
  });
  // As the parent's end would: nothing is unlocked, descriptors are closed.
  Child heir([&](Child&) {
    StoreLock mine;
    return write(&mine).code() == Code::kBusy ? 0 : 1;
  });
  EXPECT_EQ(heir.exit_code(), 0) << "the parent holds it";
  lock.reset();
  EXPECT_TRUE(another_process_can_write());
  orphan.signal();
  EXPECT_EQ(orphan.exit_code(), 0);
}

TEST_F(Locks, an_orphan_does_not_keep_the_lock_of_a_parent_that_was_killed) {
  int end[2];  // what the orphan waits for: this process lets go of it
  ASSERT_EQ(pipe2(end, O_CLOEXEC), 0);
  Child parent([&](Child& self) {
    StoreLock lock;
    if (!write(&lock).ok()) return 1;
    if (fork() == 0) {
      alarm(kDeadline.count());
      close(end[1]);
      self.signal();
      char none;
      (void)!read(end[0], &none, 1);
      _exit(0);
    }
    self.hear();
    return 0;
  });
  ASSERT_TRUE(parent.hear());
  EXPECT_FALSE(another_process_can_write());
  parent.kill();
  EXPECT_EQ(parent.exit_code(), -SIGKILL);
  EXPECT_TRUE(another_process_can_write());
  close(end[1]);
  close(end[0]);
}

TEST_F(Locks, a_forked_child_that_ends_leaves_its_parents_locks_alone) {
  StoreLock lock, reader;
  ASSERT_TRUE(is_ok(write(&lock)));
  ASSERT_TRUE(is_ok(reader.open(store, false)));
  ASSERT_TRUE(is_ok(reader.pin(kSlot)));
  Child child([&](Child&) {
    lock.release();  // what a destructor in the child would do
    reader.release();
    return 0;
  });
  EXPECT_EQ(child.exit_code(), 0);
  EXPECT_FALSE(another_process_can_write());
  EXPECT_TRUE(lock.pinned_elsewhere(kSlot));
}

TEST_F(Locks, a_forked_child_may_read_what_its_parent_writes) {
  StoreLock lock;
  ASSERT_TRUE(is_ok(write(&lock)));
  Child child([&](Child& self) {
    StoreLock reader;
    if (!reader.open(store, false).ok() || !reader.pin(kSlot).ok()) return 1;
    self.signal();
    return self.hear() ? 0 : 2;
  });
  ASSERT_TRUE(child.hear());
  EXPECT_TRUE(lock.pinned_elsewhere(kSlot));
  EXPECT_FALSE(lock.try_seal(kSlot));
  child.signal();
  EXPECT_EQ(child.exit_code(), 0);
  EXPECT_FALSE(lock.pinned_elsewhere(kSlot));
  EXPECT_TRUE(lock.try_seal(kSlot));
}

// The trap of record locks: closing any descriptor of the file drops all of the process's.
TEST_F(Locks, the_writers_lock_survives_whoever_opens_and_closes_the_files) {
  StoreLock writer;
  ASSERT_TRUE(is_ok(write(&writer)));
  for (int i = 0; i < 3; ++i) {
    StoreLock reader;
    ASSERT_TRUE(is_ok(reader.open(store, false)));
    ASSERT_TRUE(is_ok(reader.pin(kSlot)));
    reader.release();
    EXPECT_FALSE(another_process_can_write()) << "after reader " << i;
  }
  for (const std::string& file : {store, store + ".lock"}) {
    std::ifstream(file).get();  // as a copy of the folder does
    EXPECT_FALSE(another_process_can_write()) << file;
  }
  StoreLock refused;
  EXPECT_EQ(write(&refused).code(), Code::kBusy);
  refused.release();
  EXPECT_FALSE(another_process_can_write()) << "after a writer that was refused";
}

TEST_F(Locks, the_lock_is_the_stores_whatever_it_is_called) {
  StoreLock writer;
  ASSERT_TRUE(is_ok(write(&writer)));
  const std::string other = folder.file("other");
  std::filesystem::create_hard_link(store, other);
  StoreLock second;
  EXPECT_EQ(second.open(other, true).code(), Code::kBusy);
  std::filesystem::remove(store + ".lock");
  EXPECT_FALSE(another_process_can_write()) << "without the lock file";
  std::filesystem::remove(store);
  std::filesystem::rename(other, folder.file("moved"));
  EXPECT_EQ(second.open(folder.file("moved"), true).code(), Code::kBusy);
}

TEST_F(Locks, a_writer_goes_on_only_while_its_file_has_its_name) {
  const std::string other = folder.file("other");
  const auto lost = [&](const std::function<void()>& change) {
    std::ofstream(store) << "a store";
    StoreLock writer;
    EXPECT_TRUE(is_ok(write(&writer)));
    EXPECT_TRUE(is_ok(writer.check()));
    change();
    const Status status = writer.check();
    std::filesystem::remove_all(other);
    std::filesystem::remove_all(store);
    return fails(status, Code::kLost, store + " was renamed, removed or replaced");
  };
  EXPECT_TRUE(lost([&] { std::filesystem::rename(store, other); }));
  EXPECT_TRUE(lost([&] { std::filesystem::remove(store); }));
  EXPECT_TRUE(lost([&] {
    std::ofstream(other) << "another";
    std::filesystem::rename(other, store);
  }));
  EXPECT_TRUE(lost([&] {
    std::filesystem::rename(store, other);
    std::filesystem::create_directory(store);
  }));
}

TEST_F(Locks, a_name_that_cannot_be_looked_at_costs_that_call_only) {
  const std::string inner = folder.file("inner"), aside = folder.file("aside");
  std::filesystem::create_directory(inner);
  std::ofstream(inner + "/store") << "a store";
  StoreLock writer;
  ASSERT_TRUE(is_ok(writer.open(inner + "/store", true)));
  std::filesystem::rename(inner, aside);
  std::filesystem::create_symlink(inner, inner);
  EXPECT_TRUE(fails(writer.check(), Code::kIo, "cannot look at"));
  std::filesystem::remove(inner);
  std::filesystem::rename(aside, inner);
  EXPECT_TRUE(is_ok(writer.check()));
}

TEST_F(Locks, a_store_that_got_its_name_after_it_was_opened_is_known_by_it) {
  const std::string other = folder.file("other");
  StoreLock writer;
  ASSERT_TRUE(is_ok(write(&writer)));
  std::filesystem::rename(store, other);
  writer.set_path(other);
  EXPECT_TRUE(is_ok(writer.check()));
}

TEST_F(Locks, who_may_only_read_the_store_keeps_no_writer_out_and_stops_none) {
  const Foreign reader(store, O_RDONLY);
  ASSERT_TRUE(reader.lock(F_RDLCK, F_OFD_SETLK, 0, 0)) << "all of it, to the end of all offsets";
  StoreLock writer;
  ASSERT_TRUE(is_ok(write(&writer)));
  EXPECT_FALSE(writer.alone());
  EXPECT_TRUE(is_ok(writer.check()));
  EXPECT_FALSE(writer.try_seal(kSlot)) << "it pins all slots";
  EXPECT_FALSE(another_process_can_write()) << "the lock file keeps a second one out";
  ASSERT_TRUE(reader.lock(F_UNLCK, F_OFD_SETLK, 0, 0));
  EXPECT_TRUE(is_ok(writer.check()));
  EXPECT_TRUE(writer.alone()) << "it has got the lock";
  std::filesystem::remove(store + ".lock");
  EXPECT_FALSE(another_process_can_write());
}

TEST_F(Locks, a_writer_that_came_in_where_a_reader_was_in_the_way_stops_the_first_one) {
  const Foreign reader(store, O_RDONLY);
  ASSERT_TRUE(reader.lock(F_RDLCK, F_OFD_SETLK, 0, 0));
  StoreLock first, second;
  ASSERT_TRUE(is_ok(first.open(store, true)));
  ASSERT_TRUE(reader.lock(F_UNLCK, F_OFD_SETLK, 0, 0));
  ASSERT_TRUE(is_ok(second.open(store, true)));
  EXPECT_TRUE(fails(first.check(), Code::kLost, "another process has opened"));
  EXPECT_TRUE(is_ok(second.check()));
}

TEST_F(Locks, what_is_no_store_is_refused_at_once) {
  StoreLock lock;
  EXPECT_TRUE(fails(lock.open(folder.file("missing"), false), Code::kNotFound, "cannot open"));
  const std::string fifo = folder.file("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (bool writer : {false, true}) {
    EXPECT_TRUE(fails(lock.open(fifo, writer), Code::kInvalid, "neither a file nor"));
  }
}

}  // namespace
}  // namespace lightckpt
