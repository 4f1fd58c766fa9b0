// StoreLock. Goal: one writer of a store, in this process or any, whatever the store is called and
// whatever becomes of its lock file; readers that keep their version from being retired, and cannot
// do more than that; nothing that outlives a process, or is lost because some descriptor was closed.
// Method: handles in one process, forked children that say when they hold what, and locks as earlier
// releases take them, or somebody who may only read.
#include "lock.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "helpers.h"

namespace lightckpt {
namespace {

constexpr uint32_t kSlot = 3;

// A descriptor of its own, and a lock on it that is the process's (an earlier release's) or not.
struct Foreign {
  Foreign(const std::string& path, int flags) : fd(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    CHECK(fd >= 0);
  }
  ~Foreign() { close(fd); }
  bool lock(short type, int command, off_t first, off_t bytes) const {
    struct flock range = {};
    range.l_type = type;
    range.l_start = first;
    range.l_len = bytes;
    return fcntl(fd, command, &range) == 0;
  }
  int fd;
};

struct Locks : testing::Test {
  Locks() { std::ofstream(store) << "a store"; }

  Status write(StoreLock* lock) {
    bool held = false;
    if (Status status = lock->take_name(store, &held); !status.ok()) return status;
    return lock->open(store, true);
  }
  // Runs in another process: can it become the writer?
  bool another_process_can_write() {
    Child child([&](Child&) {
      StoreLock lock;
      return write(&lock).ok() ? 1 : 0;
    });
    return child.exit_code() == 1;
  }

  TempFolder folder;
  std::string store = folder.file("store");
};

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
  Child parent([&](Child& self) {
    StoreLock lock;
    if (!write(&lock).ok()) return 1;
    if (fork() == 0) {
      alarm(kDeadline.count());
      self.signal();
      pause();
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

TEST_F(Locks, a_lock_file_that_is_read_locked_keeps_no_writer_out) {
  std::ofstream(store + ".lock").close();
  const Foreign reader(store + ".lock", O_RDONLY);
  ASSERT_TRUE(reader.lock(F_RDLCK, F_OFD_SETLK, 0, 0));
  StoreLock writer;
  bool held = true;
  EXPECT_TRUE(is_ok(writer.take_name(store, &held)));
  EXPECT_FALSE(held);
  EXPECT_TRUE(is_ok(writer.open(store, true)));
  EXPECT_FALSE(another_process_can_write());
}

TEST_F(Locks, a_writer_of_an_earlier_release_is_kept_out_and_keeps_others_out) {
  Child earlier([&](Child& self) {
    const Foreign file(store + ".lock", O_RDWR | O_CREAT);
    if (!file.lock(F_WRLCK, F_SETLK, 0, 1)) return 1;
    self.signal();
    return self.hear() ? 0 : 2;
  });
  ASSERT_TRUE(earlier.hear());
  StoreLock writer;
  EXPECT_EQ(write(&writer).code(), Code::kBusy);
  EXPECT_EQ(writer.holder_pid(), earlier.pid());
  earlier.signal();
  EXPECT_EQ(earlier.exit_code(), 0);
  ASSERT_TRUE(is_ok(write(&writer)));
  const Foreign file(store + ".lock", O_RDWR);
  EXPECT_FALSE(file.lock(F_WRLCK, F_SETLK, 0, 1));
}

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

TEST_F(Locks, the_lock_file_can_be_opened_by_those_who_may_write_the_store) {
  const auto mode_beside = [&](mode_t mode) {
    StoreLock writer;
    EXPECT_EQ(chmod(store.c_str(), mode), 0);
    EXPECT_TRUE(is_ok(write(&writer)));
    struct stat file = {};
    EXPECT_EQ(stat((store + ".lock").c_str(), &file), 0);
    return file.st_mode & ACCESSPERMS;
  };
  EXPECT_EQ(mode_beside(0644), mode_t{0600});
  EXPECT_EQ(mode_beside(0664), mode_t{0660}) << "one that is there already";
  EXPECT_EQ(mode_beside(0602), mode_t{0606});
}

TEST_F(Locks, nothing_is_followed_or_made_where_the_lock_file_is_something_else) {
  const std::string lock_file = store + ".lock", victim = folder.file("victim");
  const auto goes_without = [&] {
    StoreLock writer;
    bool held = true;
    const bool ok = writer.take_name(store, &held).ok() && writer.open(store, true).ok();
    std::filesystem::remove_all(lock_file);
    return ok && !held;
  };
  std::filesystem::create_symlink(victim, lock_file);
  EXPECT_TRUE(goes_without());
  EXPECT_FALSE(std::filesystem::exists(victim));
  std::filesystem::create_directory(lock_file);
  EXPECT_TRUE(goes_without());
  ASSERT_EQ(mkfifo(lock_file.c_str(), 0600), 0);
  EXPECT_TRUE(goes_without());
}

TEST_F(Locks, a_foreign_users_lock_file_counts_for_nothing) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root: a file of another user";
  std::ofstream(store + ".lock").close();
  ASSERT_EQ(chown((store + ".lock").c_str(), 12345, 12345), 0);
  const Foreign other(store + ".lock", O_RDWR);
  ASSERT_TRUE(other.lock(F_WRLCK, F_OFD_SETLK, 0, 1));
  StoreLock writer;
  EXPECT_TRUE(is_ok(write(&writer)));
  EXPECT_FALSE(another_process_can_write());
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

TEST_F(Locks, what_is_no_store_is_refused_at_once) {
  StoreLock lock;
  EXPECT_TRUE(fails(lock.open(folder.file("missing"), false), Code::kNotFound, "cannot open"));
  const std::string fifo = folder.file("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (bool writer : {false, true}) {
    EXPECT_TRUE(fails(lock.open(fifo, writer), Code::kInvalid, "neither a file nor"));
  }
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
