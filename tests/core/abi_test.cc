// The C ABI. Goal: whatever a caller gets wrong is a code and a sentence, nothing is made or
// changed that was not asked for, and a forked child can do no harm. Method: the life of a store
// through the header alone; then each rule of the header broken once; files that are no stores,
// byte for byte the same afterwards; and a child that calls everything on what it inherited.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <thread>

extern "C" {
#include "lightckpt.h"
}

#include "helpers.h"

namespace lightckpt {
namespace {

constexpr int64_t kDeadlineNs = std::chrono::nanoseconds(kDeadline).count();

// The call gave this code, and the message names `what`.
testing::AssertionResult says(int code, int expected, const std::string& what = "") {
  const std::string message = lckpt_errmsg();
  if (code == expected && message.find(what) != std::string::npos) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "code " << code << ": \"" << message << "\", not code "
                                     << expected << " with \"" << what << "\"";
}

struct Abi : testing::Test {
  ~Abi() override { lckpt_close(&store); }

  int open(uint32_t flags, lckpt_store** handle) {
    lckpt_options options = {};
    options.flags = flags;
    options.workers = 2;
    return lckpt_open(path.c_str(), &options, handle);
  }
  int wait(uint64_t batch) {
    lckpt_report report = {};
    return lckpt_wait(store, batch, kDeadlineNs, &report);
  }
  int begin(uint64_t step) {
    const uint64_t bytes = extent.size();
    return lckpt_begin(store, step, 1, &bytes, 1, "blob", 4, host.size());
  }
  int write() {
    const lckpt_span span = {extent.data(), 0, 0};
    uint64_t batch = 0;
    const int code = lckpt_submit(store, LCKPT_WRITE, 0, &span, 1, &batch);
    return code != LCKPT_OK ? code : wait(batch);
  }
  int commit() {
    uint64_t batch = 0;
    const int code = lckpt_commit(store, host.data(), host.size(), &batch);
    return code != LCKPT_OK ? code : wait(batch);
  }
  void save(uint64_t step) {
    ASSERT_EQ(begin(step), LCKPT_OK) << lckpt_errmsg();
    ASSERT_EQ(write(), LCKPT_OK) << lckpt_errmsg();
    ASSERT_EQ(commit(), LCKPT_OK) << lckpt_errmsg();
  }
  void create() { ASSERT_EQ(open(LCKPT_CREATE, &store), LCKPT_OK) << lckpt_errmsg(); }
  std::string contents() {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  TempFolder folder{memory_folder()};
  const std::string path = folder.file("store");
  Buffer extent = random_bytes(100'000, 1);
  const std::string host = "host state";
  lckpt_store* store = nullptr;
};

TEST_F(Abi, a_version_goes_in_and_comes_back) {
  create();
  save(7);
  lckpt_version versions[4];
  uint32_t count = 0;
  ASSERT_EQ(lckpt_versions(store, versions, 4, &count), LCKPT_OK);
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(versions[0].version, 1u);
  EXPECT_EQ(versions[0].step, 7u);
  EXPECT_EQ(versions[0].extent_count, 1u);
  EXPECT_EQ(versions[0].pinned, 0u);
  EXPECT_EQ(versions[0].damaged, 0u);

  const void *manifest = nullptr, *stored_host = nullptr;
  uint64_t manifest_bytes = 0, host_bytes = 0;
  ASSERT_EQ(lckpt_view(store, 1, &manifest, &manifest_bytes, &stored_host, &host_bytes), LCKPT_OK);
  EXPECT_EQ(std::string(static_cast<const char*>(manifest), manifest_bytes), "blob");
  EXPECT_EQ(std::string(static_cast<const char*>(stored_host), host_bytes), host);

  void* memory = nullptr;
  uint64_t bytes = 0;
  ASSERT_EQ(lckpt_locate(store, 1, 0, &memory, &bytes), LCKPT_OK);
  ASSERT_EQ(bytes, extent.size());
  EXPECT_EQ(std::memcmp(memory, extent.data(), bytes), 0);
  EXPECT_TRUE(says(lckpt_locate(store, 1, 1, &memory, &bytes), LCKPT_E_INVALID, "1 of 1"));

  for (uint32_t op : {LCKPT_READ, LCKPT_COPY}) {
    Buffer back(extent.size());
    const lckpt_span span = {back.data(), 0, 0};
    uint64_t batch = 0;
    lckpt_report report = {};
    ASSERT_EQ(lckpt_submit(store, op, 1, &span, 1, &batch), LCKPT_OK);
    ASSERT_EQ(lckpt_wait(store, batch, kDeadlineNs, &report), LCKPT_OK) << lckpt_errmsg();
    EXPECT_EQ(back, extent);
    EXPECT_EQ(report.bytes, extent.size());
    EXPECT_LE(report.submit_ns, report.end_ns);
  }
}

TEST_F(Abi, stat_says_what_the_store_is_and_did) {
  create();
  save(1);
  save(2);
  ASSERT_EQ(begin(3), LCKPT_OK);
  ASSERT_EQ(lckpt_drop(store, kDeadlineNs), LCKPT_OK);
  lckpt_info info = {};
  ASSERT_EQ(lckpt_stat(store, &info), LCKPT_OK);
  EXPECT_EQ(info.bytes, std::filesystem::file_size(path));
  EXPECT_LT(info.free_bytes, info.bytes);
  EXPECT_EQ(info.slots, 64u);
  EXPECT_EQ(info.workers, 2u);
  EXPECT_EQ(info.emulated, 0u);
  EXPECT_EQ(info.commits, 2u);
  EXPECT_EQ(info.drops, 1u);
  EXPECT_EQ(info.bytes_persisted, 2 * (extent.size() + host.size()));
  EXPECT_GT(info.commit_ns, 0u);
  EXPECT_EQ(info.store_id % 2, 1u);
}

TEST_F(Abi, versions_are_pinned_rebased_and_listed_up_to_the_capacity) {
  create();
  save(1);
  save(2);
  lckpt_version versions[4];
  uint32_t count = 0;
  ASSERT_EQ(lckpt_versions(store, versions, 1, &count), LCKPT_OK);
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(versions[0].version, 2u);
  ASSERT_EQ(lckpt_pin(store, 1, 1), LCKPT_OK);
  ASSERT_EQ(lckpt_rebase(store, 1), LCKPT_OK) << lckpt_errmsg();
  ASSERT_EQ(lckpt_versions(store, versions, 4, &count), LCKPT_OK);
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(versions[0].version, 1u);
  EXPECT_EQ(versions[0].generation, 1u);
  EXPECT_EQ(versions[0].pinned, 1u);
  ASSERT_EQ(lckpt_pin(store, 1, 0), LCKPT_OK);
  EXPECT_TRUE(says(lckpt_pin(store, 2, 1), LCKPT_E_NOT_FOUND, "no version 2"));
  EXPECT_TRUE(says(lckpt_rebase(store, 2), LCKPT_E_NOT_FOUND, "no version 2"));
}

TEST_F(Abi, a_reader_sees_a_pin_of_the_writer_and_writes_to_its_own_copy) {
  create();
  save(1);
  lckpt_store* reader = nullptr;
  ASSERT_EQ(open(LCKPT_READ_ONLY, &reader), LCKPT_OK) << lckpt_errmsg();
  ASSERT_EQ(lckpt_pin(store, 1, 1), LCKPT_OK);
  lckpt_version version;
  uint32_t count = 0;
  ASSERT_EQ(lckpt_versions(reader, &version, 1, &count), LCKPT_OK);
  EXPECT_EQ(version.pinned, 2u);
  void* memory = nullptr;
  uint64_t bytes = 0;
  ASSERT_EQ(lckpt_locate(reader, 1, 0, &memory, &bytes), LCKPT_OK);
  std::memset(memory, 0, bytes);
  ASSERT_EQ(lckpt_locate(store, 1, 0, &memory, &bytes), LCKPT_OK);
  EXPECT_EQ(std::memcmp(memory, extent.data(), bytes), 0);
  const uint64_t one = 1;
  EXPECT_TRUE(says(lckpt_begin(reader, 1, 1, &one, 1, nullptr, 0, 0), LCKPT_E_ACCESS));
  EXPECT_TRUE(says(lckpt_rebase(reader, 1), LCKPT_E_ACCESS));
  EXPECT_EQ(lckpt_close(&reader), LCKPT_OK);
}

TEST_F(Abi, changed_bytes_are_reported_with_their_extent) {
  create();
  save(1);
  void* memory = nullptr;
  uint64_t bytes = 0, batch = 0;
  ASSERT_EQ(lckpt_locate(store, 1, 0, &memory, &bytes), LCKPT_OK);
  static_cast<char*>(memory)[99'999] ^= 1;
  const lckpt_span span = {nullptr, 0, 0};
  lckpt_report report = {};
  ASSERT_EQ(lckpt_submit(store, LCKPT_VERIFY, 1, &span, 1, &batch), LCKPT_OK);
  EXPECT_TRUE(says(lckpt_wait(store, batch, kDeadlineNs, &report), LCKPT_E_CHANGED, "extent 0"));
  EXPECT_EQ(report.bad_count, 1u);
  EXPECT_EQ(report.bad[0], 0u);
}

// Every function that takes a store, with arguments that are right but for it.
std::vector<int> call_everything(lckpt_store* store) {
  lckpt_info info = {};
  lckpt_version version = {};
  lckpt_report report = {};
  uint32_t count = 0;
  uint64_t bytes = 1, batch = 0;
  const void *manifest = nullptr, *host = nullptr;
  void* memory = nullptr;
  const lckpt_span span = {&bytes, 0, 0};
  return {lckpt_stat(store, &info),
          lckpt_versions(store, &version, 1, &count),
          lckpt_view(store, 1, &manifest, &bytes, &host, &bytes),
          lckpt_locate(store, 1, 0, &memory, &bytes),
          lckpt_pin(store, 1, 1),
          lckpt_rebase(store, 1),
          lckpt_begin(store, 1, 1, &bytes, 1, "b", 1, 1),
          lckpt_submit(store, LCKPT_WRITE, 0, &span, 1, &batch),
          lckpt_wait(store, 1, 0, &report),
          lckpt_commit(store, "h", 1, &batch),
          lckpt_drop(store, 0)};
}

TEST_F(Abi, a_null_handle_is_refused_by_every_function) {
  for (int code : call_everything(nullptr)) EXPECT_EQ(code, LCKPT_E_INVALID);
  EXPECT_STREQ(lckpt_errmsg(), "the store is closed");
  EXPECT_EQ(lckpt_close(nullptr), LCKPT_OK);
}

TEST_F(Abi, a_second_close_is_harmless) {
  create();
  EXPECT_EQ(lckpt_close(&store), LCKPT_OK);
  EXPECT_EQ(store, nullptr);
  EXPECT_EQ(lckpt_close(&store), LCKPT_OK);
  for (int code : call_everything(store)) EXPECT_EQ(code, LCKPT_E_INVALID);
}

TEST_F(Abi, close_waits_for_the_calls_of_other_threads_and_later_ones_find_it_closed) {
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(says(open(LCKPT_CREATE, &store), LCKPT_OK));
    save(1);
    lckpt_store* const handle = store;
    std::atomic<int> looked = 0;
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, handle] {
        lckpt_info info = {};
        int code = LCKPT_OK;
        for (; code == LCKPT_OK; ++looked) code = lckpt_stat(handle, &info);
        EXPECT_TRUE(says(code, LCKPT_E_INVALID, "the store is closed"));
      });
    }
    while (looked < 10) std::this_thread::yield();
    EXPECT_EQ(lckpt_close(&store), LCKPT_OK);
    EXPECT_EQ(store, nullptr);
    threads.clear();
    lckpt_store* again = handle;
    EXPECT_EQ(lckpt_close(&again), LCKPT_OK);
  }
}

TEST_F(Abi, open_needs_a_path_options_and_a_place_for_the_handle) {
  const lckpt_options options = {};
  EXPECT_TRUE(says(lckpt_open(nullptr, &options, &store), LCKPT_E_INVALID, "a path"));
  EXPECT_TRUE(says(lckpt_open(path.c_str(), nullptr, &store), LCKPT_E_INVALID, "options"));
  EXPECT_TRUE(says(lckpt_open(path.c_str(), &options, nullptr), LCKPT_E_INVALID, "handle"));
}

TEST_F(Abi, options_out_of_range_are_refused_and_make_nothing) {
  const auto with = [&](auto change) {
    lckpt_options options = {};
    options.flags = LCKPT_CREATE;
    change(options);
    return lckpt_open(path.c_str(), &options, &store);
  };
  EXPECT_TRUE(says(with([](auto& o) { o.media = 6; }), LCKPT_E_INVALID, "no media 6"));
  EXPECT_TRUE(says(with([](auto& o) { o.slots = 3; }), LCKPT_E_INVALID, "3 slots"));
  EXPECT_TRUE(says(with([](auto& o) { o.slots = 65; }), LCKPT_E_INVALID, "65 slots"));
  EXPECT_TRUE(says(with([](auto& o) { o.workers = 65; }), LCKPT_E_INVALID, "65 workers"));
  EXPECT_EQ(store, nullptr);
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(Abi, operations_out_of_range_are_refused) {
  create();
  save(1);
  ASSERT_EQ(begin(2), LCKPT_OK);
  const lckpt_span span = {extent.data(), 0, 0};
  uint64_t batch = 0;
  for (uint32_t op : {5u, 99u, UINT32_MAX}) {
    for (uint64_t version : {0, 1}) {
      EXPECT_TRUE(says(lckpt_submit(store, op, version, &span, 1, &batch), LCKPT_E_INVALID,
                       "no operation " + std::to_string(op)));
    }
  }
  EXPECT_TRUE(says(lckpt_submit(store, LCKPT_WRITE, 1, &span, 1, &batch), LCKPT_E_INVALID));
  EXPECT_TRUE(says(lckpt_submit(store, LCKPT_READ, 0, &span, 1, &batch), LCKPT_E_INVALID));
  lckpt_report report = {};
  EXPECT_TRUE(says(lckpt_wait(store, UINT64_MAX, 0, &report), LCKPT_E_NOT_FOUND, "never"));
}

TEST_F(Abi, sizes_that_cannot_be_are_refused) {
  create();
  for (uint64_t bytes : {uint64_t{1} << 40, uint64_t{1} << 63, UINT64_MAX}) {
    EXPECT_TRUE(says(lckpt_begin(store, 1, 1, &bytes, 1, "b", 1, 1), LCKPT_E_NO_SPACE));
    EXPECT_TRUE(says(lckpt_begin(store, 1, 1, nullptr, 0, "b", 1, bytes), LCKPT_E_NO_SPACE));
  }
  save(1);
}

TEST_F(Abi, opening_makes_nothing_but_where_it_is_asked_to_and_nothing_is) {
  EXPECT_TRUE(says(open(0, &store), LCKPT_E_NOT_FOUND, path));
  EXPECT_TRUE(says(open(LCKPT_READ_ONLY | LCKPT_CREATE, &store), LCKPT_E_NOT_FOUND));
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(Abi, opening_never_formats_what_is_there) {
  create();
  save(1);
  lckpt_close(&store);
  const std::string whole = contents();
  std::string other_format = whole;
  other_format[8] = 2;
  for (const std::string& found :
       {std::string(), std::string("x"), std::string(200'000, 'x'), std::string(200'000, '\0'),
        whole.substr(0, 100), whole.substr(0, 4096), whole.substr(0, 30'000), other_format}) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << found;
    for (uint32_t flags : {0, LCKPT_CREATE, LCKPT_READ_ONLY, LCKPT_READ_ONLY | LCKPT_CREATE}) {
      EXPECT_TRUE(says(open(flags, &store), LCKPT_E_FORMAT, path));
      EXPECT_EQ(store, nullptr);
    }
    EXPECT_EQ(contents(), found);
  }
}

TEST_F(Abi, a_store_cut_short_lists_its_versions_as_damaged) {
  create();
  save(1);
  lckpt_close(&store);
  std::filesystem::resize_file(path, 280'000);
  ASSERT_EQ(open(0, &store), LCKPT_OK) << lckpt_errmsg();
  lckpt_version version;
  uint32_t count = 0;
  ASSERT_EQ(lckpt_versions(store, &version, 1, &count), LCKPT_OK);
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(version.damaged, 1u);
  void* memory = nullptr;
  uint64_t bytes = 0;
  EXPECT_TRUE(says(lckpt_locate(store, 1, 0, &memory, &bytes), LCKPT_E_FORMAT, "version 1"));
}

TEST_F(Abi, a_second_writer_is_busy) {
  create();
  lckpt_store* second = nullptr;
  EXPECT_TRUE(says(open(0, &second), LCKPT_E_BUSY, std::to_string(getpid())));
  EXPECT_EQ(second, nullptr);
}

TEST_F(Abi, in_a_forked_child_every_call_is_refused_and_nothing_happens) {
  create();
  save(1);
  ASSERT_EQ(begin(2), LCKPT_OK);
  const std::string parent = std::to_string(getpid());
  const std::string before = contents();
  Child child([&](Child&) {
    for (int code : call_everything(store)) {
      if (code != LCKPT_E_INVALID) return 1;
      if (std::string(lckpt_errmsg()).find(parent) == std::string::npos) return 2;
    }
    if (lckpt_close(&store) != LCKPT_OK || store != nullptr) return 3;
    lckpt_store* again = nullptr;
    return open(0, &again) == LCKPT_E_BUSY ? 0 : 4;
  });
  EXPECT_EQ(child.exit_code(), 0);
  EXPECT_EQ(contents(), before);
  ASSERT_EQ(write(), LCKPT_OK) << "the parent goes on: " << lckpt_errmsg();
  ASSERT_EQ(commit(), LCKPT_OK);
}

TEST_F(Abi, a_message_is_the_calling_threads_own) {
  EXPECT_EQ(open(0, &store), LCKPT_E_NOT_FOUND);
  std::thread other([] { EXPECT_STREQ(lckpt_errmsg(), ""); });
  other.join();
  EXPECT_NE(std::string(lckpt_errmsg()), "");
}

TEST_F(Abi, a_copy_takes_time) {
  for (uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 20}) {
    for (uint32_t workers : {0u, 1u, 3u, 1000u}) {
      uint64_t copy_ns = 0;
      ASSERT_EQ(lckpt_calibrate(bytes, workers, &copy_ns), LCKPT_OK) << lckpt_errmsg();
      EXPECT_LT(copy_ns, UINT64_MAX);
      if (bytes > 0) {
        EXPECT_GT(copy_ns, 0u);
      }
    }
  }
}

}  // namespace
}  // namespace lightckpt
