// Stores on files. Goal: a store is made whole or not at all, opening never changes what it finds,
// and readers beside a writer see what it commits and keep what they pin. Method: real files on the
// temporary folder and on tmpfs; readers are second handles, or forked children where it matters
// that they are another process.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "store_helpers.h"

namespace lightckpt {
namespace {

const std::vector<uint64_t> kSizes = {5000, 0, 300};
const std::vector<uint64_t> kLarge = {3'000'000, 5000};

struct OnFile : testing::TestWithParam<std::filesystem::path> {
  OnFile() : folder(GetParam()), path(folder.file("store")) {}

  Status open(const StoreOptions& options, std::unique_ptr<Store>* store) {
    return Store::open(path, options, store);
  }
  std::unique_ptr<Store> writer() {
    StoreOptions options;
    options.create = true;
    return opened(options);
  }
  std::unique_ptr<Store> reader() {
    StoreOptions options;
    options.read_only = true;
    return opened(options);
  }
  std::unique_ptr<Store> opened(const StoreOptions& options) {
    std::unique_ptr<Store> store;
    EXPECT_TRUE(is_ok(open(options, &store)));
    return store;
  }

  TempFolder folder;
  std::string path;
};

INSTANTIATE_TEST_SUITE_P(OnEachFileSystem, OnFile,
                         testing::Values(std::filesystem::temp_directory_path(), memory_folder()));

TEST_P(OnFile, a_store_is_made_where_nothing_is_and_found_again) {
  StoreOptions options;
  std::unique_ptr<Store> store;
  EXPECT_TRUE(fails(open(options, &store), Code::kNotFound, "no store at"));
  options.create = options.read_only = true;
  EXPECT_TRUE(fails(open(options, &store), Code::kNotFound)) << "a reader makes none";
  EXPECT_FALSE(std::filesystem::exists(path));
  ASSERT_TRUE(is_ok(save(writer().get(), State::of(1, kSizes), 1)));
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
  const auto again = writer();
  EXPECT_TRUE(holds(again.get(), again->versions().front(), State::of(1, kSizes)));
  EXPECT_TRUE(is_ok(save(again.get(), State::of(2, kSizes), 1)));
  EXPECT_EQ(list_of(reader()->versions()), "2.0 1.0");
}

TEST_P(OnFile, a_new_store_has_the_slots_and_the_size_asked_for) {
  StoreOptions options;
  options.create = true;
  options.slots = 7;
  options.bytes = 3'000'001;
  const auto store = opened(options);
  EXPECT_EQ(store->header().slot_count, 7u);
  EXPECT_EQ(store->media().size(), round_up(3'000'001, kPageBytes));
  EXPECT_EQ(std::filesystem::file_size(path), store->media().size());
}

TEST_P(OnFile, what_a_crash_while_making_one_left_is_replaced) {
  std::ofstream(path + ".tmp").close();
  std::filesystem::resize_file(path + ".tmp", 1 << 20);  // room, and no header yet
  ASSERT_TRUE(is_ok(save(writer().get(), State::of(1, kSizes), 1)));
  EXPECT_FALSE(std::filesystem::exists(path + ".tmp"));
  EXPECT_EQ(list_of(reader()->versions()), "1.0");
}

TEST_P(OnFile, a_second_writer_is_refused_and_the_first_goes_on) {
  const auto first = writer();
  std::unique_ptr<Store> second;
  EXPECT_TRUE(fails(open({}, &second), Code::kBusy, std::to_string(getpid())));
  ASSERT_TRUE(is_ok(save(first.get(), State::of(1, kSizes), 1)));
  EXPECT_TRUE(fails(open({}, &second), Code::kBusy));
}

TEST_P(OnFile, a_writer_may_reopen_after_it_closed) {
  for (int i = 0; i < 3; ++i) {
    const auto store = writer();
    ASSERT_TRUE(is_ok(save(store.get(), State::of(1 + i, kSizes), 1)));
  }
  EXPECT_EQ(list_of(reader()->versions()), "3.0 2.0");
}

TEST_P(OnFile, a_reader_sees_what_the_writer_commits_later) {
  const auto writes = writer();
  const auto reads = reader();
  EXPECT_TRUE(reads->versions().empty());
  for (uint64_t step = 1; step <= 5; ++step) {
    ASSERT_TRUE(is_ok(save(writes.get(), State::of(step, kSizes), 1)));
    ASSERT_EQ(list_of(reads->versions()), list_of(writes->versions()));
    EXPECT_TRUE(holds(reads.get(), reads->versions().front(), State::of(step, kSizes)));
  }
}

TEST_P(OnFile, a_reader_follows_a_store_that_grew) {
  const auto writes = writer();
  ASSERT_TRUE(is_ok(save(writes.get(), State::of(1, kSizes), 1)));
  const auto reads = reader();
  ASSERT_EQ(list_of(reads->versions()), "1.0");
  ASSERT_TRUE(is_ok(save(writes.get(), State::of(2, kLarge), 1)));
  ASSERT_EQ(list_of(reads->versions()), "2.0 1.0");
  EXPECT_TRUE(holds(reads.get(), reads->versions().front(), State::of(2, kLarge)));
}

// The areas fit in the gap that version 1 left, so that the long manifest comes last.
TEST_P(OnFile, a_store_grows_by_whole_pages_whatever_comes_last) {
  const auto writes = writer();
  const auto reads = reader();
  ASSERT_TRUE(is_ok(save(writes.get(), State::of(1, {1000}), 1)));
  ASSERT_TRUE(is_ok(save(writes.get(), State::of(2, {1000}), 1)));
  State state = State::of(3, {});
  state.blob = random_bytes(100'001, 3);
  ASSERT_TRUE(is_ok(save(writes.get(), state, 1)));
  const Version latest = writes->versions().front();
  ASSERT_GT(latest.slot.manifest_offset, latest.slot.record_offset);
  EXPECT_EQ(writes->media().size() % kPageBytes, 0u);
  ASSERT_TRUE(is_ok(save(writes.get(), State::of(4, kLarge), 1)));
  EXPECT_TRUE(holds(writes.get(), writes->versions()[0], State::of(4, kLarge)));
  EXPECT_TRUE(holds(writes.get(), writes->versions()[1], state));
  EXPECT_TRUE(holds(reads.get(), reads->versions()[0], State::of(4, kLarge)));
}

TEST_P(OnFile, a_pin_of_another_process_keeps_its_version) {
  const auto writes = writer();
  ASSERT_TRUE(is_ok(save(writes.get(), State::of(1, kSizes), 1)));
  Child child([&](Child& self) {
    const auto reads = reader();
    Version held;
    if (!reads->pin(1, true).ok() || !reads->find(1, &held).ok()) return 1;
    self.signal();
    if (!self.hear()) return 2;  // the writer has made many versions meanwhile
    return holds(reads.get(), held, State::of(1, kSizes)) ? 0 : 3;
  });
  ASSERT_TRUE(child.hear());
  for (uint64_t step = 2; step <= 6; ++step) {
    ASSERT_TRUE(is_ok(save(writes.get(), State::of(step, kSizes), 1)));
  }
  EXPECT_EQ(list_of(writes->versions()), "6.0 5.0 1.0");
  EXPECT_TRUE(writes->pinned_elsewhere(writes->versions().back().index));
  child.signal();
  EXPECT_EQ(child.exit_code(), 0);
  ASSERT_TRUE(is_ok(save(writes.get(), State::of(7, kSizes), 1)));
  EXPECT_EQ(list_of(writes->versions()), "7.0 6.0") << "its end let go of it";
}

TEST_P(OnFile, a_reader_that_pins_gets_the_version_whole_or_not_at_all) {
  const auto writes = writer();
  ASSERT_TRUE(is_ok(save(writes.get(), State::of(1, kSizes), 1)));
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> held = 0;
  std::thread reading([&] {
    const auto reads = reader();
    while (!stop) {
      const std::vector<Version> versions = reads->versions();
      if (versions.empty()) continue;  // every slot was being rewritten just now
      const uint64_t number = versions.back().slot.version;
      if (!reads->pin(number, true).ok()) continue;
      Version version;
      if (reads->find(number, &version).ok()) {
        EXPECT_TRUE(holds(reads.get(), version, State::of(version.slot.step, kSizes)));
        ++held;
      }
      (void)reads->pin(number, false).ok();
    }
  });
  // Until the reader has come through often enough, however often it gets a core.
  const auto end = std::chrono::steady_clock::now() + kDeadline;
  for (uint64_t step = 2; held < 20 && std::chrono::steady_clock::now() < end; ++step) {
    ASSERT_TRUE(is_ok(save(writes.get(), State::of(step, kSizes), 1)));
  }
  stop = true;
  reading.join();
  EXPECT_GE(held, 20u);
}

TEST_P(OnFile, a_reader_changes_no_byte) {
  ASSERT_TRUE(is_ok(save(writer().get(), State::of(1, kSizes), 1)));
  const auto bytes_of_file = [&] {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string before = bytes_of_file();
  {
    const auto reads = reader();
    Attempt attempt;
    EXPECT_TRUE(fails(begin(reads.get(), State::of(2, kSizes), 1, &attempt), Code::kAccess));
    EXPECT_TRUE(fails(reads->rebase(1), Code::kAccess));
    ASSERT_TRUE(is_ok(reads->pin(1, true)));
  }
  EXPECT_EQ(bytes_of_file(), before);
}

TEST_P(OnFile, what_is_no_store_is_refused_and_left_as_it_is) {
  const std::string foreign(200'000, 'f');
  for (const std::string& contents : {std::string(), std::string("short"), foreign}) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << contents;
    for (bool read_only : {false, true}) {
      StoreOptions options;
      options.create = true;
      options.read_only = read_only;
      std::unique_ptr<Store> store;
      EXPECT_TRUE(fails(open(options, &store), Code::kFormat, path));
    }
    std::ifstream file(path, std::ios::binary);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), contents);
  }
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  std::unique_ptr<Store> store;
  EXPECT_TRUE(fails(open({}, &store), Code::kInvalid, "is a directory"));
}

TEST_P(OnFile, a_store_cut_short_before_opening_lists_what_is_left) {
  {
    const auto writes = writer();
    ASSERT_TRUE(is_ok(save(writes.get(), State::of(1, kSizes), 1)));
    ASSERT_TRUE(is_ok(save(writes.get(), State::of(2, kLarge), 1)));
  }
  const auto first_area = heap_offset(StoreOptions().slots) + 8 * kPageBytes;
  ASSERT_EQ(truncate(path.c_str(), first_area), 0);
  const auto again = writer();
  ASSERT_EQ(list_of(again->versions()), "2.0! 1.0");
  EXPECT_TRUE(holds(again.get(), again->versions().back(), State::of(1, kSizes)));
  ASSERT_EQ(truncate(path.c_str(), 5000), 0);
  std::unique_ptr<Store> store;
  StoreOptions options;
  options.read_only = true;
  EXPECT_TRUE(fails(open(options, &store), Code::kFormat, "too few"));
}

TEST_P(OnFile, a_file_cut_or_removed_while_open_is_never_committed_to) {
  for (bool remove : {false, true}) {
    const auto store = writer();
    ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 1)));
    const State state = State::of(2, kSizes);
    Attempt attempt;
    ASSERT_TRUE(is_ok(begin(store.get(), state, 1, &attempt)));
    if (remove) {
      std::filesystem::remove(path);
    } else {
      ASSERT_EQ(truncate(path.c_str(), heap_offset(StoreOptions().slots)), 0);
    }
    const auto table = write_extents(store.get(), attempt, state);
    EXPECT_TRUE(fails(store->commit(attempt, table, state.host), Code::kLost));
    EXPECT_TRUE(fails(begin(store.get(), state, 1, &attempt), Code::kLost)) << "for good";
    if (!remove) std::filesystem::remove(path);
  }
}

}  // namespace
}  // namespace lightckpt
