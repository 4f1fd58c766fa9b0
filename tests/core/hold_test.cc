// How a writer holds its store. Goal: a store has one writer, whatever name it is opened by and
// whoever else may read it; one that lost it ends with one clear error, for good, and harms
// nothing; who is refused hears who is in the way, if that can be known. Method: stores in files,
// opened twice in ways that went past the lock once; tokens written by hand; two that create at
// once.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <barrier>
#include <filesystem>
#include <fstream>
#include <latch>
#include <thread>

#include "holder.h"
#include "store_helpers.h"

namespace lightckpt {
namespace {

namespace fs = std::filesystem;

const std::vector<uint64_t> kSizes = {5000, 300};

struct Hold : testing::Test {
  Status open_at(const std::string& name, std::unique_ptr<Store>* store) {
    StoreOptions options;
    options.create = true;
    return Store::open(name, options, store);
  }
  std::unique_ptr<Store> writer(uint64_t step = 0) {
    std::unique_ptr<Store> store;
    EXPECT_TRUE(is_ok(open_at(path, &store)));
    if (step == 0) return store;
    EXPECT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), 1)));
    return store;
  }
  testing::AssertionResult refused(const std::string& name, const std::string& who) {
    std::unique_ptr<Store> store;
    return fails(open_at(name, &store), Code::kBusy, "is already open for writing in " + who);
  }
  // It can commit nothing more, nor go back, and says so in the same words each time.
  testing::AssertionResult lost(Store* store, const std::string& why) {
    for (int i = 0; i < 2; ++i) {
      const auto result = fails(save(store, State::of(7, kSizes), 1), Code::kLost, why);
      if (!result) return result;
    }
    return fails(store->rebase(1), Code::kLost, why);
  }
  Token token() {
    Token found = {};
    std::ifstream file(path, std::ios::binary);
    file.seekg(kTokenOffset);
    file.read(reinterpret_cast<char*>(&found), sizeof(found));
    return found;
  }
  uint64_t inode() {
    struct stat file = {};
    EXPECT_EQ(stat(path.c_str(), &file), 0);
    return file.st_ino;
  }
  void read_lock_everything(int fd) {
    struct flock all = {};
    all.l_type = F_RDLCK;
    ASSERT_EQ(fcntl(fd, F_OFD_SETLK, &all), 0);
  }

  TempFolder folder;
  std::string path = folder.file("store"), other = folder.file("other");
  const std::string me = "this process (pid " + std::to_string(getpid()) + ")";
};

TEST_F(Hold, a_store_that_is_renamed_removed_or_replaced_is_lost_and_stays_whole) {
  const auto check = [&](const std::function<void()>& change) {
    const auto store = writer(1);
    change();
    EXPECT_TRUE(lost(store.get(), path + " was renamed, removed or replaced"));
  };
  check([&] { fs::rename(path, other); });
  std::unique_ptr<Store> again;
  ASSERT_TRUE(is_ok(open_at(other, &again)));
  EXPECT_EQ(list_of(again->versions()), "1.0");
  again.reset();
  check([&] { fs::remove(path); });
  check([&] {
    std::unique_ptr<Store> new_one;
    ASSERT_TRUE(is_ok(open_at(other, &new_one)));
    EXPECT_TRUE(is_ok(save(new_one.get(), State::of(9, kSizes), 1)));
    fs::rename(other, path);
    EXPECT_TRUE(lost(new_one.get(), other + " was renamed, removed or replaced"));
  });
  EXPECT_EQ(list_of(writer()->versions()), "2.0 1.0") << "the one that came in its place";
}

TEST_F(Hold, a_store_renamed_during_an_attempt_gets_no_version) {
  const auto store = writer(1);
  const State state = State::of(2, kSizes);
  Attempt attempt;
  ASSERT_TRUE(is_ok(begin(store.get(), state, 1, &attempt)));
  const auto table = write_extents(store.get(), attempt, state);
  fs::rename(path, other);
  EXPECT_TRUE(fails(store->commit(attempt, table, state.host), Code::kLost, "was renamed"));
  EXPECT_EQ(list_of(store->versions()), "1.0");
}

TEST_F(Hold, other_names_of_a_store_find_it_held) {
  const auto store = writer(1);
  fs::create_hard_link(path, other);
  EXPECT_TRUE(refused(other, me));
  fs::remove(path + ".lock");
  EXPECT_TRUE(refused(path, me)) << "without its lock file";
  fs::create_symlink(path, folder.file("link"));
  EXPECT_TRUE(refused(folder.file("link"), me));
  EXPECT_TRUE(is_ok(save(store.get(), State::of(2, kSizes), 1))) << "the first goes on";
}

TEST_F(Hold, a_link_may_go_while_the_store_that_it_led_to_is_written) {
  writer(1);
  const std::string link = folder.file("link");
  fs::create_symlink(path, link);
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(open_at(link, &store)));
  fs::remove(link);
  fs::current_path(fs::path(path).parent_path().parent_path());
  EXPECT_TRUE(is_ok(save(store.get(), State::of(2, kSizes), 1)));
}

TEST_F(Hold, a_bind_mount_of_a_store_finds_it_held) {
  const auto store = writer(1);
  std::ofstream(other).close();
  // The mount is the child's own, and goes with it.
  Child child([&](Child&) {
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, "") != 0 ||
        mount(path.c_str(), other.c_str(), nullptr, MS_BIND, nullptr) != 0) {
      return 2;
    }
    return refused(other, "process " + std::to_string(getppid())) ? 0 : 1;
  });
  const int code = child.exit_code();
  if (code == 2) GTEST_SKIP() << "may not mount: needs root";
  EXPECT_EQ(code, 0);
}

TEST_F(Hold, the_token_names_the_holder_as_long_as_the_store_is_open) {
  {
    const auto store = writer(1);
    EXPECT_EQ(holder_of(token(), inode()), Holder::kLives);
    EXPECT_EQ(token().pid, static_cast<uint64_t>(getpid()));
  }
  EXPECT_EQ(token().nonce, 0u);
  EXPECT_EQ(holder_of(token(), inode()), Holder::kUnknown);
  StoreOptions options;
  options.read_only = true;
  std::unique_ptr<Store> reader;
  ASSERT_TRUE(is_ok(Store::open(path, options, &reader)));
  EXPECT_EQ(token().nonce, 0u) << "a reader writes none";
}

TEST_F(Hold, a_token_is_believed_only_if_it_fits) {
  Token fits;
  ASSERT_TRUE(is_ok(make_token(5, &fits)));
  EXPECT_EQ(words_of(fits, 5), me);
  EXPECT_EQ(holder_of(fits, 6), Holder::kUnknown) << "of a copy of the store";
  const auto changed = [&](const std::function<void(Token*)>& change) {
    Token token = fits;
    change(&token);
    token.crc = crc32c(0, &token, offsetof(Token, crc));
    return words_of(token, 5);
  };
  const std::string elsewhere = "not seen from here: of another container, machine or user";
  const auto ended = [](uint64_t pid) {
    return "a child of process " + std::to_string(pid) + ", which has ended";
  };
  const uint64_t pid = fits.pid;
  EXPECT_NE(changed([](Token* t) { t->boot[3] ^= 1; }).find(elsewhere), std::string::npos);
  EXPECT_NE(changed([](Token* t) { t->boot = {}; }).find(elsewhere), std::string::npos);
  EXPECT_NE(changed([](Token* t) { t->pid_namespace += 1; }).find(elsewhere), std::string::npos);
  EXPECT_NE(changed([](Token* t) { t->start_ticks = 0; }).find(elsewhere), std::string::npos);
  EXPECT_EQ(changed([](Token* t) { t->start_ticks += 1; }), ended(pid)) << "a pid used again";
  EXPECT_EQ(changed([](Token* t) { t->pid = 1 << 30; }), ended(1 << 30));
  fits.start_ticks += 1;
  EXPECT_EQ(holder_of(fits, 5), Holder::kUnknown) << "its checksum is wrong";
  EXPECT_EQ(words_of({}, 5), "another process, which has not said which it is");
}

TEST_F(Hold, a_process_that_only_waits_to_be_reaped_has_ended) {
  Child child([&](Child& self) {
    Token mine;
    if (!make_token(5, &mine).ok()) return 1;
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<char*>(&mine), sizeof(mine));
    self.signal();
    self.hear();
    return 0;
  });
  ASSERT_TRUE(child.hear());
  Token token;
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&token), sizeof(token));
  EXPECT_EQ(words_of(token, 5), "process " + std::to_string(child.pid()));
  child.kill();
  siginfo_t ignored;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child.pid()), &ignored, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(holder_of(token, 5), Holder::kEnded);
}

// Made without fork's handlers, as some runtimes do: it keeps the lock as long as it lives.
TEST_F(Hold, a_bare_clone_that_outlives_its_parent_is_named_as_its_child) {
  Child parent([&](Child& self) {
    const auto store = writer(1);
    if (syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, 0) == 0) {
      alarm(kDeadline.count());
      self.signal();
      self.hear();
      _exit(0);
    }
    pause();
    return 0;
  });
  ASSERT_TRUE(parent.hear());
  parent.kill();
  parent.exit_code();
  EXPECT_TRUE(
      refused(path, "a child of process " + std::to_string(parent.pid()) + ", which has ended"));
  parent.signal();
}

TEST_F(Hold, a_writer_whose_token_another_has_replaced_is_lost_and_leaves_that_alone) {
  Token foreign;
  {
    const auto store = writer(1);
    ASSERT_TRUE(is_ok(make_token(inode(), &foreign)));
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(kTokenOffset);
    file.write(reinterpret_cast<char*>(&foreign), sizeof(foreign));
    file.close();
    EXPECT_TRUE(lost(store.get(), "has taken it over: " + me));
  }
  EXPECT_EQ(token().nonce, foreign.nonce);
}

TEST_F(Hold, who_may_only_read_keeps_no_writer_out_and_lets_no_second_one_in) {
  writer(1);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  read_lock_everything(fd);
  const auto store = writer();
  EXPECT_TRUE(is_ok(save(store.get(), State::of(2, kSizes), 1)));
  fs::remove(path + ".lock");
  fs::create_directory(path + ".lock");
  const std::string first = "process " + std::to_string(getpid());
  Child second([&](Child&) { return refused(path, first) ? 0 : 1; });
  EXPECT_EQ(second.exit_code(), 0) << "neither lock can tell, but the token does";
  close(fd);
  EXPECT_TRUE(is_ok(save(store.get(), State::of(3, kSizes), 1)));
  EXPECT_TRUE(refused(path, me)) << "now the lock does";
}

TEST_F(Hold, readers_that_pin_all_slots_cost_versions_until_they_let_go) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "TSan leaves a process too little address space for so many mappings";
#endif
  const auto store = writer();
  StoreOptions options;
  options.read_only = true;
  std::vector<std::unique_ptr<Store>> readers;
  Status status;
  for (uint64_t step = 1; (status = save(store.get(), State::of(step, kSizes), 1)).ok(); ++step) {
    ASSERT_TRUE(is_ok(Store::open(path, options, &readers.emplace_back())));
    ASSERT_TRUE(is_ok(readers.back()->pin(store->versions().front().slot.version, true)));
  }
  EXPECT_EQ(readers.size(), 63u);
  EXPECT_TRUE(fails(status, Code::kBusy, "readers hold 63 versions"));
  readers.erase(readers.begin());
  EXPECT_TRUE(is_ok(save(store.get(), State::of(100, kSizes), 1)));
  readers.clear();
  EXPECT_TRUE(is_ok(save(store.get(), State::of(101, kSizes), 1)));
  EXPECT_EQ(list_of(store->versions()), "65.0 64.0");
}

TEST_F(Hold, a_link_that_leads_nowhere_makes_the_store_where_it_leads) {
  const std::string home = folder.file("home"), far = folder.file("far");
  for (const std::string& name : {home, far}) fs::create_directory(name);
  fs::create_symlink("../far/next", home + "/store");
  fs::create_symlink(far + "/last", far + "/next");
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(open_at(home + "/store", &store)));
  ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 1)));
  EXPECT_TRUE(fs::is_symlink(home + "/store"));
  EXPECT_TRUE(fs::is_regular_file(far + "/last"));
  EXPECT_TRUE(fs::exists(far + "/last.lock")) << "beside the store";
  EXPECT_EQ(std::distance(fs::directory_iterator(home), fs::directory_iterator()), 1);
}

TEST_F(Hold, a_path_that_no_store_can_have_is_refused_at_once) {
  std::unique_ptr<Store> store;
  fs::create_symlink(path, path);
  EXPECT_TRUE(fails(open_at(path, &store), Code::kInvalid, "loop of symbolic links"));
  fs::create_symlink(folder.file("missing/store"), other);
  EXPECT_TRUE(fails(open_at(other, &store), Code::kNotFound, "folder of"));
  EXPECT_TRUE(fails(open_at(folder.file("none/"), &store), Code::kNotFound, "folder of"));
  EXPECT_TRUE(fails(open_at("", &store), Code::kInvalid, "is empty"));
  const std::string fifo = folder.file("fifo"), directory = folder.file("directory");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  fs::create_directory(directory);
  struct sockaddr_un address = {AF_UNIX, {}};
  std::strncpy(address.sun_path, folder.file("socket").c_str(), sizeof(address.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof(address)), 0);
  close(fd);
  for (bool read_only : {false, true}) {
    StoreOptions options;
    options.create = !read_only;
    options.read_only = read_only;
    const auto refuses = [&](const std::string& name, const std::string& why) {
      return fails(Store::open(name, options, &store), Code::kInvalid, why);
    };
    EXPECT_TRUE(refuses(fifo, "neither a file nor"));
    EXPECT_TRUE(refuses(folder.file("socket"), "neither a file nor"));
    EXPECT_TRUE(refuses(directory, "is a directory"));
  }
}

TEST_F(Hold, of_those_that_create_at_once_one_does_and_no_store_is_replaced) {
  for (bool with_lock_file : {true, false}) {
    for (int round = 0; round < 20; ++round) {
      if (!with_lock_file) fs::create_directory(path + ".lock");
      constexpr int kAtOnce = 4;
      std::latch all(kAtOnce);
      std::array<std::unique_ptr<Store>, kAtOnce> stores;
      std::array<Status, kAtOnce> results;
      {
        std::vector<std::jthread> threads;
        for (int i = 0; i < kAtOnce; ++i) {
          threads.emplace_back([&, i] {
            all.arrive_and_wait();
            results[i] = open_at(path, &stores[i]);
          });
        }
      }
      EXPECT_EQ(std::ranges::count_if(results, [](const Status& s) { return s.ok(); }), 1);
      for (int i = 0; i < kAtOnce; ++i) {
        if (!results[i].ok()) {
          EXPECT_TRUE(fails(results[i], Code::kBusy));
          continue;
        }
        EXPECT_TRUE(is_ok(save(stores[i].get(), State::of(1, kSizes), 1)));
      }
      std::error_code ignored;
      fs::remove(path);
      fs::remove(path + ".lock", ignored);
      EXPECT_TRUE(fs::is_empty(fs::path(path).parent_path()));
    }
  }
}

// A copy that is published over it, as an archive is: each open finds one whole store.
TEST_F(Hold, a_store_that_is_replaced_while_it_is_opened_is_opened_whole) {
  writer(1);
  StoreOptions options;
  options.read_only = true;
  constexpr int kRounds = 200;
  std::barrier both(2);
  std::jthread replacer([&] {
    for (int i = 0; i < kRounds; ++i) {
      fs::copy_file(path, other);
      both.arrive_and_wait();
      fs::rename(other, path);
      both.arrive_and_wait();
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    std::unique_ptr<Store> reader;
    both.arrive_and_wait();
    const Status status = Store::open(path, options, &reader);
    both.arrive_and_wait();
    EXPECT_TRUE(is_ok(status));
    EXPECT_EQ(status.ok() ? list_of(reader->versions()) : "", "1.0");
  }
}

TEST_F(Hold, names_as_long_as_there_may_be_do) {
  const std::string name = folder.file(std::string(255, 'x'));
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(open_at(name, &store))) << "without a lock file, which has no name";
  EXPECT_TRUE(refused(name, me));
}

}  // namespace
}  // namespace lightckpt
