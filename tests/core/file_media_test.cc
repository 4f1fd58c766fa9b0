// FileMedia. Goal: what a path is, is found and not believed; too little room is a clean error that
// changes nothing, and passes with its cause; a file that is cut short or removed under its mapping
// is an error and not a death. Method: real files, on the temporary folder and on tmpfs; a file
// system of 1 MiB, a limit on file sizes and btrfs stand in for a full disk.
#include "file_media.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/vfs.h>

#include <algorithm>
#include <fstream>

#include "test_media.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 256 * 1024;
const std::filesystem::path kTmpfs = "/dev/shm";

bool is_tmpfs(const std::filesystem::path& folder) {
  struct statfs volume;
  return statfs(folder.c_str(), &volume) == 0 && volume.f_type == TMPFS_MAGIC;
}

std::unique_ptr<Media> created(const std::string& path, uint64_t bytes = kBytes,
                               MediaKind want = MediaKind::kAuto) {
  std::unique_ptr<Media> media;
  EXPECT_TRUE(is_ok(FileMedia::create(path, want, bytes, &media)));
  return media;
}

std::unique_ptr<Media> opened(const std::string& path, bool read_only = false) {
  std::unique_ptr<Media> media;
  EXPECT_TRUE(is_ok(FileMedia::open(path, MediaKind::kAuto, read_only, &media)));
  return media;
}

struct OnEachFileSystem : testing::TestWithParam<const char*> {
  void SetUp() override {
    if (std::string(GetParam()) == "tmpfs" && !is_tmpfs(kTmpfs)) GTEST_SKIP() << "no /dev/shm";
    const bool in_memory = std::string(GetParam()) == "tmpfs";
    folder =
        std::make_unique<TempFolder>(in_memory ? kTmpfs : std::filesystem::temp_directory_path());
    path = folder->file("media");
  }

  std::unique_ptr<TempFolder> folder;
  std::string path;
};

INSTANTIATE_TEST_SUITE_P(FileMedia, OnEachFileSystem, testing::Values("disk", "tmpfs"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST_P(OnEachFileSystem, what_the_path_is_is_found) {
  const auto media = created(path);
  ASSERT_NE(media, nullptr);
  const bool in_memory = is_tmpfs(std::filesystem::path(path).parent_path());
  if (media->kind() == MediaKind::kPmem) GTEST_SKIP() << "the temporary folder is DAX";
  EXPECT_EQ(media->kind(), in_memory ? MediaKind::kTmpfs : MediaKind::kFile);
  EXPECT_EQ(media->granularity(), in_memory ? Granularity::kVolatile : Granularity::kPage);
  EXPECT_EQ(media->flush_method(), in_memory ? FlushMethod::kNone : FlushMethod::kMsync);
  EXPECT_FALSE(media->emulated());
  EXPECT_EQ(media->size(), kBytes);
}

TEST_P(OnEachFileSystem, what_the_path_is_not_is_refused_and_leaves_no_file) {
  const bool in_memory = is_tmpfs(std::filesystem::path(path).parent_path());
  std::unique_ptr<Media> media;
  EXPECT_TRUE(fails(FileMedia::create(path, MediaKind::kPmem, kBytes, &media), Code::kInvalid,
                    "not persistent memory"));
  EXPECT_FALSE(std::filesystem::exists(path));
  if (!in_memory) {
    EXPECT_TRUE(fails(FileMedia::create(path, MediaKind::kTmpfs, kBytes, &media), Code::kInvalid,
                      "does not lie on tmpfs"));
    EXPECT_FALSE(std::filesystem::exists(path));
  }
}

TEST_P(OnEachFileSystem, a_forced_granularity_is_reported_as_emulated) {
  const auto media = created(path, kBytes, MediaKind::kEmulated);
  ASSERT_NE(media, nullptr);
  EXPECT_EQ(media->granularity(), Granularity::kCacheLine);
  EXPECT_EQ(media->flush_method(), best_flush_method());
  EXPECT_TRUE(media->emulated());
  const Buffer data = random_bytes(5000, 1);
  media->nt_copy(100, data);
  ASSERT_TRUE(is_ok(media->drain()));
  EXPECT_TRUE(std::ranges::equal(data, Bytes(media->view() + 100, data.size())));
}

TEST_P(OnEachFileSystem, what_was_drained_is_in_the_file) {
  const Buffer data = random_bytes(5000, 2);
  {
    const auto media = created(path);
    ASSERT_NE(media, nullptr);
    media->nt_copy(4000, data);
    ASSERT_TRUE(is_ok(media->drain()));
    EXPECT_TRUE(is_ok(media->check()));
  }
  for (bool read_only : {false, true}) {
    const auto media = opened(path, read_only);
    ASSERT_NE(media, nullptr);
    EXPECT_EQ(media->size(), kBytes);
    media->populate(0, kBytes);
    media->populate(4000, 10);
    EXPECT_TRUE(std::ranges::equal(data, Bytes(media->view() + 4000, data.size())));
  }
}

TEST_P(OnEachFileSystem, growing_keeps_pointers_and_bytes) {
  const auto media = created(path);
  ASSERT_NE(media, nullptr);
  const std::byte* before = media->view();
  const Buffer data = random_bytes(kBytes, 3);
  media->nt_copy(0, data);
  for (uint64_t bytes : {kBytes + 4096, 4 * kBytes, uint64_t{8} << 20}) {
    ASSERT_TRUE(is_ok(media->grow(bytes)));
    EXPECT_EQ(media->view(), before);
    EXPECT_EQ(media->size(), bytes);
    EXPECT_EQ(std::filesystem::file_size(path), bytes);
    media->populate(bytes - 4096, 4096);
    media->store(bytes - 64, Bytes(data).first(64));
  }
  EXPECT_TRUE(std::ranges::equal(data, Bytes(media->view(), data.size())));
  ASSERT_TRUE(is_ok(media->drain()));
  EXPECT_TRUE(is_ok(media->check()));
  ASSERT_TRUE(is_ok(media->grow(10))) << "less than it has";
  EXPECT_EQ(media->size(), uint64_t{8} << 20);
}

TEST_P(OnEachFileSystem, a_reader_writes_to_its_own_copy_only) {
  const auto media = created(path);
  ASSERT_NE(media, nullptr);
  media->store(0, Buffer(64, std::byte{1}));
  const auto reader = opened(path, true);
  ASSERT_NE(reader, nullptr);
  std::ranges::fill(std::span(reader->private_view(), 64), std::byte{2});
  EXPECT_EQ(media->view()[0], std::byte{1});
  EXPECT_EQ(reader->view()[0], std::byte{1}) << "what it reads for itself is the store's";
  media->store(0, Buffer(128, std::byte{3}));
  EXPECT_EQ(reader->private_view()[0], std::byte{2});
  EXPECT_EQ(reader->view()[0], std::byte{3});
  reader->forget_private(0, kBytes);
  EXPECT_EQ(reader->private_view()[0], std::byte{3});
  EXPECT_EQ(media->private_view(), media->view()) << "a writer's is the store";
  EXPECT_TRUE(fails(reader->grow(2 * kBytes), Code::kAccess, "reading only"));
}

TEST_P(OnEachFileSystem, a_file_cut_short_is_an_error_and_not_a_death) {
  for (bool read_only : {false, true}) {
    std::filesystem::remove(path);
    const auto writer = created(path);
    ASSERT_NE(writer, nullptr);
    const auto media = opened(path, read_only);
    ASSERT_NE(media, nullptr);
    ASSERT_EQ(truncate(path.c_str(), 4096), 0);
    EXPECT_TRUE(fails(media->check(), Code::kLost, "was cut to 4096 bytes"));
    std::byte sum{0};
    for (uint64_t at = 0; at < kBytes; at += 4096) sum ^= media->view()[at];
    EXPECT_EQ(sum, std::byte{0});
    if (read_only) {
      media->private_view()[kBytes / 2] = std::byte{1};
    } else {
      media->store(kBytes / 2, Buffer(64, std::byte{1}));
    }
    EXPECT_TRUE(fails(media->check(), Code::kLost, "lost pages under its mapping: it was cut"));
    // Its length alone brings nothing back.
    ASSERT_EQ(truncate(path.c_str(), kBytes), 0);
    EXPECT_TRUE(fails(media->check(), Code::kLost, "lost pages under its mapping: it was cut"));
  }
}

TEST_P(OnEachFileSystem, a_removed_file_is_an_error) {
  const auto media = created(path);
  ASSERT_NE(media, nullptr);
  std::filesystem::remove(path);
  EXPECT_TRUE(fails(media->check(), Code::kLost, "was removed"));
}

TEST_P(OnEachFileSystem, a_forked_child_does_not_inherit_the_mapping) {
  const auto media = created(path);
  ASSERT_NE(media, nullptr);
  ASSERT_TRUE(is_ok(media->grow(2 * kBytes)));
  Child child([&](Child&) {
    for (uint64_t at = 0; at < media->size(); at += 4096) {
      void* page = const_cast<std::byte*>(media->view()) + at;
      if (msync(page, 4096, MS_ASYNC) == 0 || errno != ENOMEM) return 1;  // ENOMEM: not mapped
    }
    return 0;
  });
  EXPECT_EQ(child.exit_code(), 0);
}

TEST_P(OnEachFileSystem, a_limit_on_file_sizes_is_a_clean_error) {
  Child child([&](Child&) {
    const auto media = created(path);
    const Buffer before(media->view(), media->view() + kBytes);
    const struct rlimit limit = {4 * kBytes, 4 * kBytes};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    ::signal(SIGXFSZ, SIG_IGN);  // as Python has it
    if (!fails(media->grow(8 * kBytes), Code::kNoSpace, "no room")) return 2;
    if (media->size() != kBytes || std::filesystem::file_size(path) != kBytes) return 3;
    if (!is_ok(media->check())) return 4;
    if (!std::ranges::equal(before, Bytes(media->view(), kBytes))) return 5;
    if (!is_ok(media->grow(2 * kBytes))) return 6;
    std::unique_ptr<Media> other;
    if (FileMedia::create(path + "2", MediaKind::kAuto, 8 * kBytes, &other).code() !=
        Code::kNoSpace) {
      return 7;
    }
    return std::filesystem::exists(path + "2") ? 8 : 0;
  });
  EXPECT_EQ(child.exit_code(), 0);
}

TEST(FileMedia, a_full_file_system_is_a_clean_error_that_leaves_all_as_it_was) {
  TempFolder folder;
  const std::string volume = folder.file("small");
  std::filesystem::create_directory(volume);
  if (mount("tmpfs", volume.c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "may not mount";
  {
    const auto media = created(volume + "/media");
    ASSERT_NE(media, nullptr);
    const Buffer data = random_bytes(kBytes, 4);
    media->nt_copy(0, data);
    EXPECT_TRUE(fails(media->grow(8 * kBytes), Code::kNoSpace, "are free"));
    EXPECT_EQ(media->size(), kBytes);
    EXPECT_EQ(std::filesystem::file_size(volume + "/media"), kBytes);
    EXPECT_TRUE(is_ok(media->check()));
    EXPECT_TRUE(std::ranges::equal(data, Bytes(media->view(), kBytes)));
    EXPECT_TRUE(is_ok(media->grow(2 * kBytes))) << "the failed try gave its space back";
    std::unique_ptr<Media> other;
    EXPECT_TRUE(fails(FileMedia::create(volume + "/other", MediaKind::kAuto, 8 * kBytes, &other),
                      Code::kNoSpace));
    EXPECT_FALSE(std::filesystem::exists(volume + "/other"));
  }
  EXPECT_EQ(umount(volume.c_str()), 0);
}

TEST(FileMedia, what_is_no_file_of_bytes_is_refused) {
  TempFolder folder;
  std::unique_ptr<Media> media;
  const auto open = [&](const std::string& path, bool read_only) {
    return FileMedia::open(path, MediaKind::kAuto, read_only, &media);
  };
  EXPECT_TRUE(fails(open(folder.file("missing"), false), Code::kNotFound, "missing"));
  EXPECT_TRUE(fails(open(folder.file(""), true), Code::kInvalid, "neither a file"));
  EXPECT_TRUE(fails(open("/dev/null", true), Code::kFormat, "empty"));
  std::ofstream(folder.file("empty")).close();
  EXPECT_TRUE(fails(open(folder.file("empty"), false), Code::kFormat, "empty"));
  EXPECT_TRUE(fails(FileMedia::create(folder.file("empty"), MediaKind::kAuto, kBytes, &media),
                    Code::kIo, "cannot create"));
}

TEST(FileMedia, more_growth_than_was_reserved_is_a_clean_error) {
  TempFolder folder;
  const auto media = created(folder.file("media"));
  ASSERT_NE(media, nullptr);
  EXPECT_TRUE(fails(media->grow(uint64_t{1} << 50), Code::kNoSpace, "reopen it"));
  EXPECT_TRUE(fails(media->grow(UINT64_MAX), Code::kNoSpace, "reopen it"));
  EXPECT_EQ(media->size(), kBytes);
}

}  // namespace
}  // namespace lightckpt
