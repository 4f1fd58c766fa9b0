// Pmem2. Goal: what libpmem2 cannot tell is an error and not a guess; without it there is one clear
// status, and all else is as it was. Method: files on disk and on tmpfs; libraries that are missing
// or are other ones; a media that counts shutdowns. Real bad blocks and counts need persistent
// memory: tests/fsdax has some. All that calls the library skips where it is missing.
#include "pmem2.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include "file_media.h"
#include "store_helpers.h"
#include "test_media.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 512 * 1024;

TEST(Pmem2, a_library_that_is_missing_or_another_is_not_found) {
  std::unique_ptr<Pmem2> library;
  EXPECT_TRUE(fails(Pmem2::load("libno-such-thing.so.1", &library), Code::kNotFound,
                    "apt-get install libpmem2-1"));
  EXPECT_TRUE(fails(Pmem2::load("libc.so.6", &library), Code::kNotFound, "has no pmem2_errormsg"));
  EXPECT_EQ(library, nullptr);
}

TEST(Pmem2, a_message_names_the_first_bad_blocks_and_counts_the_rest) {
  EXPECT_EQ(words_of({{4096, 512}}), "4096 to 4608");
  EXPECT_EQ(words_of({{0, 512}, {1024, 512}}), "0 to 512, 1024 to 1536");
  const std::vector<BadBlock> many(7, BadBlock{512, 512});
  EXPECT_EQ(words_of(many), "512 to 1024, 512 to 1024, 512 to 1024, 512 to 1024 and 3 more");
}

class OnFile : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const Status status = Pmem2::load(&library);
    if (!status.ok()) GTEST_SKIP() << status.message();
    const bool in_memory = std::string(GetParam()) == "tmpfs";
    folder = std::make_unique<TempFolder>(in_memory ? memory_folder()
                                                    : std::filesystem::temp_directory_path());
    path = folder->file("media");
    std::unique_ptr<Media> made;
    ASSERT_TRUE(is_ok(FileMedia::create(path, MediaKind::kAuto, kBytes, &made)));
    built_in = std::move(made);
    fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0);
  }
  void TearDown() override {
    if (fd >= 0) close(fd);
  }

  const Pmem2* library = nullptr;
  std::unique_ptr<TempFolder> folder;
  std::string path;
  std::unique_ptr<Media> built_in;
  int fd = -1;
};

INSTANTIATE_TEST_SUITE_P(Pmem2, OnFile, testing::Values("disk", "tmpfs"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST_P(OnFile, of_what_is_no_persistent_memory_it_makes_nothing_up) {
  if (built_in->kind() == MediaKind::kPmem) GTEST_SKIP() << "the folder is persistent memory";
  uint64_t count = 0;
  const Status shutdowns = library->unsafe_shutdowns(fd, &count);
  EXPECT_FALSE(shutdowns.ok());
  EXPECT_FALSE(shutdowns.message().empty());
  std::vector<BadBlock> found = {{1, 1}};
  (void)library->bad_blocks(fd, &found);
  EXPECT_TRUE(found.empty());
  EXPECT_EQ(built_in->unsafe_shutdowns(), std::nullopt);
  EXPECT_FALSE(library->bad_blocks(-1, &found).ok());
}

// Memory of a device that counts its shutdowns.
class CountingMedia final : public Media {
 public:
  explicit CountingMedia(std::optional<uint64_t> count) : count_(count), memory_(kBytes) {
    base_ = memory_.data();
    size_ = kBytes;
  }
  std::optional<uint64_t> unsafe_shutdowns() const override { return count_; }
  void set_count(std::optional<uint64_t> count) { count_ = count; }
  Status grow(uint64_t) override { return {Code::kNoSpace, "this media is full"}; }
  Status check() const override { return {}; }
  void populate(uint64_t, uint64_t) override {}

 protected:
  Status sync(uint64_t, uint64_t) override { return {}; }

 private:
  std::optional<uint64_t> count_;
  Buffer memory_;
};

TEST(Shutdowns, are_counted_from_when_the_store_was_made) {
  for (std::optional<uint64_t> made :
       {std::optional<uint64_t>(), std::optional<uint64_t>(0), std::optional<uint64_t>(41)}) {
    auto owned = std::make_unique<CountingMedia>(made);
    CountingMedia* media = owned.get();
    std::unique_ptr<Store> store;
    ASSERT_TRUE(is_ok(Store::open(std::move(owned), {}, true, &store)));
    EXPECT_EQ(store->header().shutdowns, made ? *made + 1 : 0);
    EXPECT_EQ(store->unsafe_shutdowns(), 0u);
    media->set_count(made.value_or(0) + 2);
    EXPECT_EQ(store->unsafe_shutdowns(), made ? 2u : 0u);
    // On another device, or where it cannot be read any more, nothing is known.
    media->set_count(std::nullopt);
    EXPECT_EQ(store->unsafe_shutdowns(), 0u);
    if (made.value_or(0) > 0) media->set_count(*made - 1);
    EXPECT_EQ(store->unsafe_shutdowns(), 0u);
  }
}

// hugetlbfs counts in huge pages: what is made and grown is a multiple of one.
TEST(HugePages, lengths_go_by_them) {
  TempFolder folder;
  const std::string volume = folder.file("huge");
  std::filesystem::create_directory(volume);
  if (mount("hugetlbfs", volume.c_str(), "hugetlbfs", 0, "pagesize=2M") != 0) {
    GTEST_SKIP() << "may not mount hugetlbfs";
  }
  {
    std::unique_ptr<Media> media;
    const Status made = FileMedia::create(volume + "/media", MediaKind::kAuto, kBytes, &media);
    if (made.code() == Code::kNoSpace) {
      umount(volume.c_str());
      GTEST_SKIP() << "no huge pages are set aside: " << made.message();
    }
    ASSERT_TRUE(is_ok(made));
    EXPECT_EQ(media->kind(), MediaKind::kTmpfs);
    EXPECT_EQ(media->size(), 2u << 20);
    media->store(0, random_bytes(64, 1));
    ASSERT_TRUE(is_ok(media->grow((2 << 20) + 4096)));
    EXPECT_EQ(media->size(), 4u << 20);
    media->populate(3 << 20, 4096);
    media->store((4 << 20) - 64, random_bytes(64, 2));
    EXPECT_TRUE(is_ok(media->check()));
    std::unique_ptr<Media> reader;
    ASSERT_TRUE(is_ok(FileMedia::open(volume + "/media", MediaKind::kAuto, true, &reader)));
    ASSERT_TRUE(is_ok(media->grow(5 << 20)));
    EXPECT_TRUE(reader->follow());
    EXPECT_EQ(reader->size(), 6u << 20);
  }
  EXPECT_EQ(umount(volume.c_str()), 0);
}

}  // namespace
}  // namespace lightckpt
