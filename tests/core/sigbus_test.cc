// SigbusGuard. Goal: a page that goes under a guarded mapping is an error and not a death, whoever
// sets a handler of SIGBUS before or after; and a SIGBUS of somebody else's has the effect that it
// would have without us. Method: files that are cut short under their mappings; handlers as other
// libraries have them; deaths are watched from outside, by the signal that ended them.
#include "sigbus.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "file_media.h"
#include "helpers.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 256 * 1024;

// A file without a name, since who dies in it cleans nothing up.
std::string nameless_file(uint64_t bytes) {
  const int fd = memfd_create("media", 0);
  CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  return "/proc/self/fd/" + std::to_string(fd);
}

std::unique_ptr<Media> opened(const std::string& path) {
  std::unique_ptr<Media> media;
  CHECK(FileMedia::open(path, MediaKind::kAuto, false, &media).ok());
  return media;
}

// Touches a mapping that nobody guards, behind the end of its file.
void touch_behind_the_end() {
  const int fd = open(nameless_file(0).c_str(), O_RDONLY);
  CHECK(fd >= 0);
  auto* page = static_cast<volatile char*>(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0));
  CHECK(page != MAP_FAILED);
  (void)*page;
}

// A file without a name counts as removed, so it takes more than a failed check.
bool has_lost_pages(const Media& media) {
  return fails(media.check(), Code::kLost, "lost pages under its mapping: it was cut short");
}

// Cuts a guarded file and touches it: true if that is an error.
bool survives_a_cut() {
  const std::string path = nameless_file(kBytes);
  const auto media = opened(path);
  CHECK(truncate(path.c_str(), 0) == 0);
  media->store(kBytes / 2, Buffer(64, std::byte{1}));
  return has_lost_pages(*media);
}

struct sigaction previous;

void set_handler(void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_NODEFER;
  CHECK(sigaction(SIGBUS, &action, &previous) == 0);
}

void tell(const char* word) { CHECK(write(STDERR_FILENO, word, 1) == 1); }

void tell_and_exit(int) { _exit(42); }
void tell_and_return(int) { tell("r"); }
// As Python's faulthandler: it puts back what was there before it, and raises again.
void tell_and_put_back(int number) {
  tell("f");
  sigaction(SIGBUS, &previous, nullptr);
  raise(number);
}

// Dies: gtest's process, not this one.
struct SigbusDeathTest : testing::Test {
  SigbusDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(SigbusDeathTest, a_fault_of_somebody_else_still_ends_the_process) {
  EXPECT_EXIT(
      {
        set_handler(SIG_DFL);
        CHECK(survives_a_cut());
        touch_behind_the_end();
      },
      testing::KilledBySignal(SIGBUS), "");
}

TEST_F(SigbusDeathTest, a_fault_of_somebody_else_that_was_to_be_ignored_still_ends_the_process) {
  EXPECT_EXIT(
      {
        set_handler(SIG_IGN);
        CHECK(survives_a_cut());
        touch_behind_the_end();
      },
      testing::KilledBySignal(SIGBUS), "");
}

TEST_F(SigbusDeathTest, a_fault_of_somebody_else_reaches_the_handler_that_was_there_before) {
  EXPECT_EXIT(
      {
        set_handler(tell_and_exit);
        CHECK(survives_a_cut());
        touch_behind_the_end();
      },
      testing::ExitedWithCode(42), "");
}

TEST_F(SigbusDeathTest, a_handler_that_is_set_later_takes_no_guard_away_and_gets_what_is_its_own) {
  EXPECT_EXIT(
      {
        const auto media = opened(nameless_file(kBytes));
        set_handler(tell_and_exit);
        CHECK(survives_a_cut());
        touch_behind_the_end();
      },
      testing::ExitedWithCode(42), "");
}

TEST_F(SigbusDeathTest, a_reader_of_a_mapping_is_guarded_after_a_later_handler_too) {
  EXPECT_EXIT(
      {
        const std::string path = nameless_file(kBytes);
        const auto media = opened(path);
        set_handler(SIG_DFL);
        CHECK(truncate(path.c_str(), 0) == 0);
        CHECK(media->view()[kBytes / 2] == std::byte{0});
        CHECK(has_lost_pages(*media));
        _exit(42);
      },
      testing::ExitedWithCode(42), "");
}

TEST_F(SigbusDeathTest, a_handler_that_raises_again_is_called_once_and_the_process_ends) {
  for (bool late : {false, true}) {
    EXPECT_EXIT(
        {
          set_handler(SIG_DFL);
          if (late) CHECK(survives_a_cut());
          set_handler(tell_and_put_back);
          CHECK(survives_a_cut());
          touch_behind_the_end();
        },
        testing::KilledBySignal(SIGBUS), testing::Eq("f"));
  }
}

TEST_F(SigbusDeathTest, a_handler_that_only_returns_does_not_meet_the_same_fault_for_ever) {
  for (bool late : {false, true}) {
    EXPECT_EXIT(
        {
          if (late) CHECK(survives_a_cut());
          set_handler(tell_and_return);
          CHECK(survives_a_cut());
          touch_behind_the_end();
        },
        testing::KilledBySignal(SIGBUS), "rr");
  }
}

TEST_F(SigbusDeathTest, one_that_takes_itself_away_is_not_called_any_more) {
  EXPECT_EXIT(
      {
        set_handler(tell_and_exit);
        CHECK(survives_a_cut());
        set_handler(tell_and_return);
        CHECK(survives_a_cut());
        CHECK(sigaction(SIGBUS, &previous, nullptr) == 0);
        CHECK(survives_a_cut());
        touch_behind_the_end();
      },
      testing::ExitedWithCode(42), testing::Eq(""));
}

TEST_F(SigbusDeathTest, what_is_sent_has_the_effect_that_it_would_have_had) {
  EXPECT_EXIT(
      {
        set_handler(SIG_DFL);
        CHECK(survives_a_cut());
        raise(SIGBUS);
      },
      testing::KilledBySignal(SIGBUS), "");
  EXPECT_EXIT(
      {
        set_handler(SIG_IGN);
        CHECK(survives_a_cut());
        raise(SIGBUS);
        set_handler(tell_and_return);
        CHECK(survives_a_cut());
        for (int i = 0; i < 3; ++i) kill(getpid(), SIGBUS);
        _exit(42);
      },
      testing::ExitedWithCode(42), testing::Eq("rrr"));
}

TEST_F(SigbusDeathTest, more_handlers_than_there_are_levels_still_leave_the_guard_on_top) {
  EXPECT_EXIT(
      {
        set_handler(SIG_DFL);
        // Each a function of its own, as far as anybody can tell: none of them is called.
        for (uintptr_t i = 0; i < 40; ++i) {
          set_handler(reinterpret_cast<void (*)(int)>(0x1000 + 16 * i));
          CHECK(survives_a_cut());
        }
        set_handler(tell_and_exit);
        CHECK(survives_a_cut());
        touch_behind_the_end();
      },
      testing::ExitedWithCode(42), "");
}

TEST(SigbusGuard, any_number_of_mappings_is_guarded_each_for_itself) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "TSan leaves a process too little address space for so many mappings";
#endif
  constexpr size_t kMany = 300;
  const std::string path = nameless_file(kBytes);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<Media>> all;
    for (size_t i = 0; i < kMany; ++i) all.push_back(opened(path));
    CHECK(truncate(path.c_str(), 0) == 0);
    all.back()->store(4096, Buffer(64, std::byte{1}));
    all[kMany / 2]->store(4096, Buffer(64, std::byte{1}));
    CHECK(truncate(path.c_str(), kBytes) == 0);
    for (size_t i = 0; i < kMany; ++i) {
      const bool touched = i + 1 == kMany || i == kMany / 2;
      EXPECT_EQ(has_lost_pages(*all[i]), touched) << "mapping " << i;
    }
  }
}

TEST(SigbusGuard, a_forked_child_guards_its_own) {
  const auto media = opened(nameless_file(kBytes));
  Child child([&](Child&) { return survives_a_cut() ? 0 : 1; });
  EXPECT_EQ(child.exit_code(), 0);
}

}  // namespace
}  // namespace lightckpt
