// The pmemobj catalog. Goal: a store whose slots and manifests are in a pool keeps the same
// promises as one that has them in itself, and no piece of a manifest is lost or leaked in the
// pool. Method: the store's life on files, with reopenings and kills; pools that are missing,
// foreign or cut; manifests of every size around a piece. Without libpmemobj only its absence can
// be tried.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "pmemobj/pmemobj_catalog.h"
#include "store_helpers.h"

namespace lightckpt {
namespace {

const std::vector<uint64_t> kSizes = {5000, 0, 300};
const std::vector<uint64_t> kOther = {700, 9000};

struct OnCatalog : testing::Test {
  OnCatalog() : folder(memory_folder()), path(folder.file("store")) {}

  void SetUp() override {
    if (const Status status = PmemobjPool::library(); !status.ok())
      GTEST_SKIP() << status.message();
  }
  static StoreOptions options() {
    StoreOptions options;
    options.create = true;
    options.catalog = CatalogKind::kPmemobj;
    return options;
  }
  std::unique_ptr<Store> opened() {
    std::unique_ptr<Store> store;
    EXPECT_TRUE(is_ok(Store::open(path, options(), &store)));
    return store;
  }
  // The objects in the pool of a store that is closed.
  size_t pieces() {
    std::unique_ptr<PmemobjPool> pool;
    EXPECT_TRUE(
        is_ok(PmemobjPool::open(PmemobjCatalog::path_of(path), "lightckpt-catalog", &pool)));
    size_t count = 0;
    pool->each([&](uint64_t, uint64_t, uint64_t) { ++count; });
    return count;
  }

  TempFolder folder;
  std::string path;
};

State with_blob(uint64_t step, uint64_t bytes) {
  State state = State::of(step, kSizes);
  state.blob = random_bytes(bytes, bytes + 7);
  return state;
}

TEST_F(OnCatalog, versions_are_committed_found_again_and_retired) {
  for (uint64_t step = 1; step <= 6; ++step) {
    const auto store = opened();
    const State state = State::of(step, step % 3 == 0 ? kOther : kSizes);
    ASSERT_TRUE(is_ok(save(store.get(), state, 1)));
    EXPECT_TRUE(holds(store.get(), store->versions().front(), state));
  }
  const auto store = opened();
  EXPECT_EQ(list_of(store->versions()), "6.0 5.0");
  EXPECT_TRUE(holds(store.get(), store->versions().front(), State::of(6, kOther)));
  EXPECT_TRUE(holds(store.get(), store->versions().back(), State::of(5, kSizes)));
}

TEST_F(OnCatalog, the_media_has_no_slot_and_no_manifest) {
  const auto store = opened();
  const State state = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(save(store.get(), state, 1)));
  const Media& media = store->media();
  for (uint32_t index = 0; index < store->header().slot_count; ++index) {
    EXPECT_TRUE(std::all_of(media.view() + slot_offset(index),
                            media.view() + slot_offset(index + 1),
                            [](std::byte byte) { return byte == std::byte{0}; }));
  }
  const Bytes all(media.view(), media.size());
  EXPECT_TRUE(std::ranges::search(all, state.blob).empty());
}

TEST_F(OnCatalog, an_older_version_is_made_latest_and_pins_hold) {
  auto store = opened();
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), 3)));
  }
  ASSERT_TRUE(is_ok(store->pin(1, true)));
  ASSERT_TRUE(is_ok(store->rebase(2)));
  EXPECT_EQ(list_of(store->versions()), "2.1 1.0");
  for (uint64_t step = 4; step <= 8; ++step) {
    ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kOther), 1)));
  }
  EXPECT_TRUE(holds(store.get(), store->versions().back(), State::of(1, kSizes)));
  store.reset();
  store = opened();
  EXPECT_EQ(list_of(store->versions()), "7.1 6.1 1.0");
}

TEST_F(OnCatalog, manifests_of_every_size_come_back) {
  constexpr uint64_t kPiece = 64 << 10;
  for (uint64_t bytes : {uint64_t{1}, kPiece - 100, kPiece - 16, kPiece, 3 * kPiece, 40 * kPiece}) {
    const State state = with_blob(bytes, bytes);
    {
      const auto store = opened();
      ASSERT_TRUE(is_ok(save(store.get(), state, 1))) << bytes;
      EXPECT_TRUE(holds(store.get(), store->versions().front(), state)) << bytes;
    }
    const auto store = opened();
    EXPECT_TRUE(holds(store.get(), store->versions().front(), state)) << bytes;
  }
}

TEST_F(OnCatalog, pieces_that_nothing_names_are_freed) {
  {
    const auto store = opened();
    for (uint64_t step = 1; step <= 20;
         ++step) {  // each has a manifest of its own, of three pieces
      ASSERT_TRUE(is_ok(save(store.get(), with_blob(step, 150'000 + step), 1)));
    }
    Attempt dropped;
    ASSERT_TRUE(is_ok(begin(store.get(), with_blob(21, 200'000), 1, &dropped)));
  }
  EXPECT_EQ(pieces(), 3u + 4u) << "two versions were there, one was retired for the attempt";
  {
    const auto store = opened();
  }
  EXPECT_EQ(pieces(), 3u);
}

TEST_F(OnCatalog, attempts_that_are_dropped_one_after_another_do_not_fill_the_pool) {
  auto store = opened();
  const State large = with_blob(2, 1 << 20);
  ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 1)));
  Attempt dropped;
  for (uint64_t i = 0; i < 2 * kPoolBytes / large.blob.size(); ++i) {
    ASSERT_TRUE(is_ok(begin(store.get(), large, 1, &dropped))) << i;
  }
  store.reset();
  EXPECT_EQ(pieces(), 1u + 17u) << "the version's, and the last attempt's";
}

TEST_F(OnCatalog, a_manifest_is_shared_by_the_versions_of_one_structure) {
  {
    const auto store = opened();
    for (uint64_t step = 1; step <= 5; ++step) {
      ASSERT_TRUE(is_ok(save(store.get(), State::of(step, kSizes), 3)));
    }
  }
  EXPECT_EQ(pieces(), 1u);
}

TEST_F(OnCatalog, a_pool_without_room_refuses_the_manifest_and_loses_nothing) {
  auto store = opened();
  const State first = State::of(1, kSizes);
  ASSERT_TRUE(is_ok(save(store.get(), first, 1)));
  const State large = with_blob(2, kPoolBytes);
  Attempt attempt;
  EXPECT_TRUE(fails(begin(store.get(), large, 1, &attempt), Code::kNoSpace, "has no room"));
  EXPECT_TRUE(holds(store.get(), store->versions().front(), first));
  ASSERT_TRUE(is_ok(save(store.get(), State::of(3, kSizes), 1)));
  store.reset();
  store = opened();
  EXPECT_EQ(list_of(store->versions()), "2.0 1.0");
}

TEST_F(OnCatalog, a_kill_at_any_moment_keeps_what_was_acknowledged) {
  {
    const auto store = opened();
  }
  uint64_t acknowledged = 0;
  for (int round = 0; round < 20; ++round) {
    const uint64_t from = acknowledged;
    Child child([&](Child& self) {
      std::unique_ptr<Store> store;
      if (!Store::open(path, options(), &store).ok()) return 1;
      for (uint64_t step = from + 1;; ++step) {
        if (!save(store.get(), State::of(step, step % 3 == 0 ? kOther : kSizes), 1).ok()) return 2;
        self.signal();
      }
    });
    for (int i = 0; i <= round % 4; ++i) {
      ASSERT_TRUE(child.hear());
      ++acknowledged;
    }
    child.kill();
    ASSERT_EQ(child.exit_code(), -SIGKILL);
    const auto store = opened();
    const Version latest = store->versions().front();
    ASSERT_GE(latest.slot.step, acknowledged);
    acknowledged = latest.slot.step;
    EXPECT_TRUE(holds(store.get(), latest,
                      State::of(acknowledged, acknowledged % 3 == 0 ? kOther : kSizes)));
  }
}

TEST_F(OnCatalog, a_second_handle_is_busy_and_a_forked_child_holds_nothing) {
  auto store = opened();
  StoreOptions reading;
  reading.read_only = true;
  std::unique_ptr<Store> second;
  EXPECT_TRUE(fails(Store::open(path, reading, &second), Code::kBusy, ".catalog"));
  Child child([](Child& self) { return self.hear() ? 0 : 1; });
  store.reset();
  EXPECT_TRUE(is_ok(Store::open(path, reading, &second))) << "the child is still there";
  child.signal();
  EXPECT_EQ(child.exit_code(), 0);
}

TEST_F(OnCatalog, a_catalog_that_is_missing_foreign_or_cut_is_an_error_that_names_it) {
  const std::string catalog = PmemobjCatalog::path_of(path);
  {
    const auto store = opened();
  }
  std::filesystem::copy_file(catalog, folder.file("kept"));
  std::unique_ptr<Store> store;
  std::filesystem::remove(catalog);
  EXPECT_TRUE(fails(Store::open(path, {}, &store), Code::kNotFound, catalog));
  std::ofstream(catalog) << "short";
  EXPECT_TRUE(fails(Store::open(path, {}, &store), Code::kFormat, "is no pool"));
  std::filesystem::resize_file(catalog, kPoolBytes);
  EXPECT_TRUE(fails(Store::open(path, {}, &store), Code::kFormat, catalog));
  std::filesystem::remove(catalog);
  std::filesystem::copy_file(folder.file("kept"), catalog);
  EXPECT_TRUE(is_ok(Store::open(path, {}, &store)));
  store.reset();

  path = folder.file("other");
  {
    const auto other = opened();
  }
  std::filesystem::copy_file(folder.file("kept"), PmemobjCatalog::path_of(path),
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_TRUE(fails(Store::open(path, {}, &store), Code::kFormat, "another store"));
}

TEST_F(OnCatalog, a_store_is_opened_as_what_it_is) {
  std::unique_ptr<Store> store;
  StoreOptions lines = options();
  lines.catalog = CatalogKind::kLines;
  {
    const auto made = opened();
  }
  EXPECT_TRUE(fails(Store::open(path, lines, &store), Code::kInvalid, "in a pmemobj catalog"));
  path = folder.file("lines");
  ASSERT_TRUE(is_ok(Store::open(path, lines, &store)));
  store.reset();
  EXPECT_TRUE(fails(Store::open(path, options(), &store), Code::kInvalid, "in itself"));
}

TEST_F(OnCatalog, a_new_store_takes_no_catalog_of_an_older_one) {
  {
    const auto store = opened();
    ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 1)));
  }
  std::filesystem::remove(path);
  EXPECT_EQ(list_of(opened()->versions()), "");
}

// Every byte of the slots, and of a manifest's pieces, changed: a damaged version is named, and the
// others stay.
TEST_F(OnCatalog, a_flipped_byte_in_the_pool_costs_no_other_version) {
  {
    const auto store = opened();
    ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 2)));
    ASSERT_TRUE(is_ok(save(store.get(), State::of(2, kOther), 2)));
  }
  const std::string catalog = PmemobjCatalog::path_of(path);
  Buffer pool(kPoolBytes);
  std::ifstream(catalog, std::ios::binary).read(reinterpret_cast<char*>(pool.data()), kPoolBytes);
  const Buffer blob = State::of(2, kOther).blob;
  const auto found = std::ranges::search(pool, blob);
  ASSERT_FALSE(found.empty());
  const auto at = static_cast<uint64_t>(found.begin() - pool.begin());
  for (uint64_t back : {uint64_t{0}, 8 * kOther.size() + 1, 8 * kOther.size() + 40 + 8}) {
    std::fstream file(catalog, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(at - back));
    file.put(static_cast<char>(pool[at - back] ^ std::byte{0x41}));
    file.close();
    {
      std::unique_ptr<Store> store;
      StoreOptions reading;
      reading.read_only = true;
      ASSERT_TRUE(is_ok(Store::open(path, reading, &store)));
      EXPECT_EQ(list_of(store->versions()), "2.0! 1.0") << back;
      EXPECT_TRUE(holds(store.get(), store->versions().back(), State::of(1, kSizes)));
    }
    file.open(catalog, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(at - back));
    file.put(static_cast<char>(pool[at - back]));
  }
}

TEST(Catalog, without_a_path_there_is_no_place_for_a_pool) {
  StoreOptions options;
  options.catalog = CatalogKind::kPmemobj;
  std::unique_ptr<Store> store;
  EXPECT_TRUE(fails(Store::open(std::make_unique<HeapMedia>(1 << 20), options, true, &store),
                    Code::kInvalid, "beside a file"));
}

}  // namespace
}  // namespace lightckpt
