// PATH.lock. Goal: it keeps writers of this and of earlier releases apart, can be opened by those
// who may write the store only, and where it cannot be had the store's own lock decides alone.
// Method: lock files of every kind put there by hand, and locks as earlier releases take them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "lock_helpers.h"

namespace lightckpt {
namespace {

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

}  // namespace
}  // namespace lightckpt
