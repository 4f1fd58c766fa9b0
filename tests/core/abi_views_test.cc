// Memory of a store that somebody still looks at. Goal: with a lease it stays mapped after the
// store is closed, and no longer than the last lease; a forked child unmaps nothing of its
// parent's. Method: the header alone; what is mapped is read from /proc.
#include <gtest/gtest.h>

#include <fstream>

extern "C" {
#include "lightckpt.h"
}

#include "helpers.h"

namespace lightckpt {
namespace {

struct AbiViews : testing::Test {
  AbiViews() {
    lckpt_options options = {};
    options.flags = LCKPT_CREATE;
    options.workers = 1;
    EXPECT_EQ(lckpt_open(path.c_str(), &options, &store), LCKPT_OK) << lckpt_errmsg();
    const uint64_t bytes = extent.size();
    const lckpt_span span = {extent.data(), 0, 0};
    lckpt_report report = {};
    uint64_t batch = 0;
    EXPECT_EQ(lckpt_begin(store, 1, 1, &bytes, 1, "blob", 4, 4), LCKPT_OK);
    EXPECT_EQ(lckpt_submit(store, LCKPT_WRITE, 0, &span, 1, &batch), LCKPT_OK);
    EXPECT_EQ(lckpt_wait(store, batch, -1, &report), LCKPT_OK);
    EXPECT_EQ(lckpt_commit(store, "host", 4, &batch), LCKPT_OK);
    EXPECT_EQ(lckpt_wait(store, batch, -1, &report), LCKPT_OK);
  }
  ~AbiViews() override { lckpt_close(&store); }

  const char* locate() {
    void* memory = nullptr;
    uint64_t bytes = 0;
    EXPECT_EQ(lckpt_locate(store, 1, 0, &memory, &bytes), LCKPT_OK) << lckpt_errmsg();
    return static_cast<const char*>(memory);
  }
  bool is_mapped() const {
    std::ifstream maps("/proc/self/maps");
    const std::string all{std::istreambuf_iterator<char>(maps), {}};
    return all.find(path) != std::string::npos;
  }

  TempFolder folder{memory_folder()};
  const std::string path = folder.file("store");
  Buffer extent = random_bytes(100'000, 1);
  lckpt_store* store = nullptr;
};

TEST_F(AbiViews, memory_stays_until_store_and_leases_are_gone) {
  const char* memory = locate();
  lckpt_lease *first = nullptr, *second = nullptr;
  ASSERT_EQ(lckpt_hold(store, &first), LCKPT_OK);
  ASSERT_EQ(lckpt_hold(store, &second), LCKPT_OK);
  ASSERT_EQ(lckpt_let_go(&second), LCKPT_OK);
  EXPECT_EQ(second, nullptr);
  EXPECT_EQ(std::memcmp(memory, extent.data(), extent.size()), 0) << "the store is open";
  ASSERT_EQ(lckpt_close(&store), LCKPT_OK);
  EXPECT_EQ(std::memcmp(memory, extent.data(), extent.size()), 0) << "one lease is left";
  ASSERT_EQ(lckpt_let_go(&first), LCKPT_OK);
  EXPECT_FALSE(is_mapped());
  EXPECT_EQ(lckpt_let_go(&first), LCKPT_OK) << "a second time is harmless";
}

TEST_F(AbiViews, a_lease_keeps_no_store_open) {
  lckpt_lease* lease = nullptr;
  ASSERT_EQ(lckpt_hold(store, &lease), LCKPT_OK);
  ASSERT_EQ(lckpt_close(&store), LCKPT_OK);
  lckpt_options options = {};
  EXPECT_EQ(lckpt_open(path.c_str(), &options, &store), LCKPT_OK) << lckpt_errmsg();
  EXPECT_EQ(lckpt_let_go(&lease), LCKPT_OK);
}

TEST_F(AbiViews, without_a_lease_nothing_stays) {
  ASSERT_TRUE(is_mapped());
  ASSERT_EQ(lckpt_close(&store), LCKPT_OK);
  EXPECT_FALSE(is_mapped());
}

TEST_F(AbiViews, what_is_closed_or_missing_gives_no_lease) {
  lckpt_lease* lease = nullptr;
  EXPECT_EQ(lckpt_hold(store, nullptr), LCKPT_E_INVALID);
  EXPECT_EQ(lckpt_hold(nullptr, &lease), LCKPT_E_INVALID);
  ASSERT_EQ(lckpt_close(&store), LCKPT_OK);
  EXPECT_EQ(lckpt_hold(store, &lease), LCKPT_E_INVALID);
  EXPECT_EQ(lease, nullptr);
  EXPECT_EQ(lckpt_let_go(nullptr), LCKPT_OK);
}

TEST_F(AbiViews, a_forked_child_lets_go_of_nothing) {
  lckpt_lease* lease = nullptr;
  ASSERT_EQ(lckpt_hold(store, &lease), LCKPT_OK);
  const char* memory = locate();
  Child child([&](Child&) {
    lckpt_lease* inherited = lease;
    lckpt_lease* none = nullptr;
    if (lckpt_hold(store, &none) != LCKPT_E_INVALID || none != nullptr) return 1;
    return lckpt_let_go(&inherited) == LCKPT_OK && inherited == nullptr ? 0 : 2;
  });
  EXPECT_EQ(child.exit_code(), 0);
  EXPECT_EQ(std::memcmp(memory, extent.data(), extent.size()), 0);
  EXPECT_EQ(lckpt_let_go(&lease), LCKPT_OK);
}

}  // namespace
}  // namespace lightckpt
