// Room for a file, taken ahead. Goal: growth goes on beside any number of signals, keeps what it
// has allocated, and undoes all of it when it fails; a system call that a signal interrupts is
// called again; a sparse copy of a store has its blocks before it is written to, and a store of an
// odd length grows. Method: the calls themselves, which this program has in libc's place, say
// EINTR, fail, and look at the signals that are held back; a file system of 1 MiB stands in for a
// full disk.
#include "file_space.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/falloc.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <fstream>

#include "file_media.h"
#include "store_helpers.h"

namespace {

struct Call {
  off_t offset;
  off_t bytes;
  bool held_back;
};
std::vector<Call> allocations;
std::function<int(size_t)> on_allocation;  // what the call with this number says, if not 0
int interruptions = 0;                     // of the calls to come
int interrupted = 0;

bool is_interrupted() {
  if (interruptions == 0) return false;
  --interruptions;
  ++interrupted;
  errno = EINTR;
  return true;
}

}  // namespace

extern "C" int posix_fallocate(int fd, off_t offset, off_t bytes) {
  sigset_t held_back;
  pthread_sigmask(SIG_BLOCK, nullptr, &held_back);
  const bool faults_pass = sigismember(&held_back, SIGBUS) == 0;
  allocations.push_back({offset, bytes, sigismember(&held_back, SIGALRM) == 1 && faults_pass});
  if (on_allocation) {
    if (const int error = on_allocation(allocations.size() - 1); error != 0) return error;
  }
  return syscall(SYS_fallocate, fd, 0, offset, bytes) == 0 ? 0 : errno;
}
extern "C" int fsync(int fd) {
  return is_interrupted() ? -1 : static_cast<int>(syscall(SYS_fsync, fd));
}
extern "C" int ftruncate(int fd, off_t bytes) noexcept {
  return is_interrupted() ? -1 : static_cast<int>(syscall(SYS_ftruncate, fd, bytes));
}
extern "C" int msync(void* memory, size_t bytes, int flags) {
  return is_interrupted() ? -1 : static_cast<int>(syscall(SYS_msync, memory, bytes, flags));
}

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 256 * 1024;
constexpr uint64_t kMiB = 1 << 20;
const std::vector<uint64_t> kSizes = {5000, 0, 300};

struct FileSpace : testing::Test {
  FileSpace() {
    allocations.clear();
    on_allocation = nullptr;
    interruptions = interrupted = 0;
  }
  std::unique_ptr<Media> created() {
    std::unique_ptr<Media> media;
    EXPECT_TRUE(is_ok(FileMedia::create(path, MediaKind::kAuto, kBytes, &media)));
    allocations.clear();
    return media;
  }

  TempFolder folder{memory_folder()};
  const std::string path = folder.file("media");
};

TEST_F(FileSpace, growth_comes_in_pieces_each_beside_signals_and_again_where_one_interrupts) {
  const auto media = created();
  ASSERT_NE(media, nullptr);
  on_allocation = [](size_t call) { return call == 1 || call == 2 ? EINTR : 0; };
  ASSERT_TRUE(is_ok(media->grow(kBytes + 130 * kMiB)));
  EXPECT_EQ(media->size(), kBytes + 130 * kMiB);
  std::vector<off_t> offsets;
  for (const Call& call : allocations) {
    offsets.push_back((call.offset - static_cast<off_t>(kBytes)) / static_cast<off_t>(kMiB));
    EXPECT_LE(call.bytes, static_cast<off_t>(64 * kMiB));
    EXPECT_TRUE(call.held_back) << "and a fault must still reach its handler";
  }
  EXPECT_EQ(offsets, (std::vector<off_t>{0, 64, 64, 64, 128})) << "what was allocated is kept";
  sigset_t after;
  pthread_sigmask(SIG_BLOCK, nullptr, &after);
  EXPECT_EQ(sigismember(&after, SIGALRM), 0);
}

TEST_F(FileSpace, growth_that_fails_behind_its_first_piece_is_undone) {
  const auto media = created();
  ASSERT_NE(media, nullptr);
  for (const auto& [error, code] : {std::pair{ENOSPC, Code::kNoSpace}, std::pair{EIO, Code::kIo}}) {
    on_allocation = [&, first = allocations.size()](size_t call) {
      return call == first + 1 ? error : 0;
    };
    EXPECT_TRUE(fails(media->grow(kBytes + 130 * kMiB), code, "more are needed"));
    EXPECT_EQ(media->size(), kBytes);
    EXPECT_EQ(std::filesystem::file_size(path), kBytes);
    EXPECT_TRUE(is_ok(media->check())) << "the media has not failed";
  }
  on_allocation = nullptr;
  EXPECT_TRUE(is_ok(media->grow(2 * kBytes)));
}

TEST_F(FileSpace, calls_that_a_signal_interrupts_are_called_again) {
  TempFolder on_disk;
  std::unique_ptr<Media> media;
  interruptions = 3;
  ASSERT_TRUE(is_ok(FileMedia::create(on_disk.file("media"), MediaKind::kFile, kBytes, &media)));
  EXPECT_EQ(interrupted, 3) << "fsync of the new file";
  interruptions = 3;
  ASSERT_TRUE(is_ok(media->grow(2 * kBytes)));
  EXPECT_EQ(interrupted, 6) << "fsync of the new length";
  interruptions = 3;
  media->store(0, Buffer(64, std::byte{1}));
  media->flush(0, 64);
  ASSERT_TRUE(is_ok(media->drain()));
  EXPECT_EQ(interrupted, 9) << "msync";
  on_allocation = [n = 0](size_t) mutable { return n++ == 0 ? 0 : ENOSPC; };
  interruptions = 3;
  EXPECT_TRUE(fails(media->grow(100 * kMiB), Code::kNoSpace, "more are needed"));
  EXPECT_EQ(interrupted, 12) << "ftruncate";
  EXPECT_EQ(std::filesystem::file_size(on_disk.file("media")), 2 * kBytes);
}

// A copy with holes where the pages are zeros, as cp makes one.
void copy_sparse(const std::string& from, const std::string& to) {
  std::ifstream in(from, std::ios::binary);
  std::ofstream out(to, std::ios::binary);
  std::vector<char> page(4096);
  while (in.read(page.data(), static_cast<std::streamsize>(page.size())) || in.gcount() > 0) {
    const bool zeros = std::ranges::all_of(page, [](char byte) { return byte == 0; });
    zeros ? out.seekp(in.gcount(), std::ios::cur) : out.write(page.data(), in.gcount());
    if (!in) break;
  }
  out.close();
  std::filesystem::resize_file(to, std::filesystem::file_size(from));
}

uint64_t blocks_of(const std::string& path) {
  struct stat file;
  CHECK(stat(path.c_str(), &file) == 0);
  return static_cast<uint64_t>(file.st_blocks) * 512;
}

TEST_F(FileSpace, a_sparse_copy_has_all_its_blocks_before_it_is_written_to) {
  StoreOptions options;
  options.create = true;
  options.bytes = 8 * kMiB;
  std::unique_ptr<Store> store;
  ASSERT_TRUE(is_ok(Store::open(path, options, &store)));
  ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 1)));
  store.reset();
  const std::string copy = folder.file("copy");
  copy_sparse(path, copy);
  ASSERT_LT(blocks_of(copy), 8 * kMiB) << "the file system of this test has holes";
  options.read_only = true;
  ASSERT_TRUE(is_ok(Store::open(copy, options, &store)));
  EXPECT_TRUE(holds(store.get(), store->versions().front(), State::of(1, kSizes)));
  EXPECT_LT(blocks_of(copy), 8 * kMiB) << "a reader changes nothing";
  options.read_only = false;
  store.reset();
  ASSERT_TRUE(is_ok(Store::open(copy, options, &store)));
  EXPECT_GE(blocks_of(copy), 8 * kMiB);
  EXPECT_TRUE(holds(store.get(), store->versions().front(), State::of(1, kSizes)));
}

TEST_F(FileSpace, a_sparse_copy_for_which_there_is_no_room_is_refused_and_left_as_it_is) {
  const std::string volume = folder.file("small");
  std::filesystem::create_directory(volume);
  if (mount("tmpfs", volume.c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "may not mount";
  {
    const auto media = created();
    ASSERT_NE(media, nullptr);
    ASSERT_TRUE(is_ok(media->grow(8 * kMiB)));
    media->store(0, random_bytes(kBytes, 1));
    const std::string copy = volume + "/copy";
    copy_sparse(path, copy);
    const uint64_t blocks = blocks_of(copy);
    std::unique_ptr<Media> opened;
    EXPECT_TRUE(fails(FileMedia::open(copy, MediaKind::kAuto, false, &opened), Code::kNoSpace,
                      "a sparse file"));
    EXPECT_EQ(blocks_of(copy), blocks);
    EXPECT_EQ(std::filesystem::file_size(copy), 8 * kMiB);
    EXPECT_TRUE(is_ok(FileMedia::open(copy, MediaKind::kAuto, true, &opened)));
    EXPECT_TRUE(
        std::ranges::equal(Bytes(opened->view(), 8 * kMiB), Bytes(media->view(), 8 * kMiB)));
    std::unique_ptr<Media> reader;
    ASSERT_TRUE(is_ok(FileMedia::open(copy, MediaKind::kAuto, true, &reader)));
    std::ofstream(volume + "/filler") << std::string(kMiB, 'x');
    std::byte sum{0};
    for (uint64_t at = 0; at < 8 * kMiB; at += 4096) sum ^= reader->view()[at];
    EXPECT_TRUE(fails(reader->check(), Code::kNoSpace, "no space for")) << static_cast<int>(sum);
    opened.reset();
    reader.reset();
  }
  EXPECT_EQ(umount(volume.c_str()), 0);
}

// A byte that was appended, or what a copy tool adds; or less, where a manifest comes last.
TEST_F(FileSpace, a_store_of_an_odd_length_is_read_written_and_grows) {
  for (uint64_t odd : {1, 63, 4095}) {
    std::filesystem::remove(path);
    StoreOptions options;
    options.create = true;
    std::unique_ptr<Store> store;
    ASSERT_TRUE(is_ok(Store::open(path, options, &store)));
    ASSERT_TRUE(is_ok(save(store.get(), State::of(1, kSizes), 1)));
    store.reset();
    const uint64_t before = std::filesystem::file_size(path);
    std::ofstream(path, std::ios::binary | std::ios::app) << std::string(odd, 'x');
    ASSERT_TRUE(is_ok(Store::open(path, options, &store)));
    EXPECT_EQ(store->media().size(), before + odd);
    StoreOptions reading;
    reading.read_only = true;
    std::unique_ptr<Store> reader;
    ASSERT_TRUE(is_ok(Store::open(path, reading, &reader)));
    on_allocation = [](size_t) { return ENOSPC; };
    EXPECT_TRUE(fails(save(store.get(), State::of(2, {1'000'000}), 1), Code::kNoSpace));
    EXPECT_EQ(std::filesystem::file_size(path), before + odd) << "undone to the byte";
    on_allocation = nullptr;
    for (uint64_t step = 2; step < 5; ++step) {
      const State state = State::of(step, {step * 1'000'000});
      ASSERT_TRUE(is_ok(save(store.get(), state, 1)));
      EXPECT_TRUE(holds(store.get(), store->versions().front(), state));
      EXPECT_TRUE(holds(reader.get(), reader->versions().front(), state)) << "it follows";
    }
    store.reset();
    ASSERT_TRUE(is_ok(Store::open(path, options, &store)));
    EXPECT_TRUE(holds(store.get(), store->versions().front(), State::of(4, {4'000'000})));
  }
}

}  // namespace
}  // namespace lightckpt
