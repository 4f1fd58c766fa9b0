// Opening, growing and checking a file that is mapped. See file_media.h.
#include "file_media.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <new>

#include "pmem2.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace lightckpt {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2ull << 20;
constexpr uint64_t kReserveMin = 256ull << 30;
constexpr uint64_t kReserveFactor = 16;

// The kernel's folder of a device DAX node, or of the block device below a file; "" if none.
std::string sysfs_of(const struct stat& file) {
  const bool is_device = S_ISCHR(file.st_mode);
  const dev_t device = is_device ? file.st_rdev : file.st_dev;
  const std::string link = std::string("/sys/dev/") + (is_device ? "char/" : "block/") +
                           std::to_string(major(device)) + ":" + std::to_string(minor(device));
  char* resolved = realpath(link.c_str(), nullptr);
  const std::string folder = resolved == nullptr ? "" : resolved;
  std::free(resolved);
  return folder;
}

// The first word of the file, 0 and "" if there is none.
template <typename Value>
Value read_from(const std::string& path) {
  std::ifstream file(path);
  Value value{};
  file >> value;
  return value;
}

// Does the device below hold the processor's caches in its persistence domain (eADR)? The kernel
// says so per region, some directories above the block or character device.
bool caches_are_persistent(const struct stat& file) {
  for (std::string folder = sysfs_of(file); folder.size() > 4; folder.resize(folder.rfind('/'))) {
    const auto value = read_from<std::string>(folder + "/persistence_domain");
    if (!value.empty()) return value == "cpu_cache";
  }
  return false;
}

// What offsets and lengths of mappings must be multiples of: the alignment of a device DAX node
// (older kernels have it one directory up), the huge page of hugetlbfs, or the page.
uint64_t mapping_unit(const struct stat& file, const struct statfs& volume) {
  if (S_ISCHR(file.st_mode)) {
    const std::string folder = sysfs_of(file);
    for (const char* name : {"/align", "/../dax_region/align"}) {
      if (const auto unit = read_from<uint64_t>(folder + name); unit != 0) return unit;
    }
    return kHugePage;
  }
  if (volume.f_type == HUGETLBFS_MAGIC) return static_cast<uint64_t>(volume.f_bsize);
  return kPage;
}

std::string mib(uint64_t bytes) {
  return std::to_string(bytes) + " bytes (" + std::to_string(bytes >> 20) + " MiB)";
}

constexpr uint64_t round_up(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

Status FileMedia::open(const std::string& path, MediaKind want, bool read_only,
                       std::unique_ptr<Media>* media) {
  const int fd = ::open(path.c_str(), (read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
  if (fd < 0) return from_errno("cannot open " + path);
  std::unique_ptr<FileMedia> file = make(path, fd, want);
  file->read_only_ = read_only;
  RETURN_IF_ERROR(file->measure());
  RETURN_IF_ERROR(file->identify(want));
  RETURN_IF_ERROR(file->reserve());
  RETURN_IF_ERROR(file->map(0, file->size_));
  *media = std::move(file);
  return {};
}

Status FileMedia::create(const std::string& path, MediaKind want, uint64_t bytes,
                         std::unique_ptr<Media>* media) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return from_errno("cannot create " + path);
  std::unique_ptr<FileMedia> file = make(path, fd, want);
  Status status = file->measure();
  if (status.ok()) status = file->allocate(0, file->whole_units(bytes));
  if (status.ok()) status = file->measure();
  if (status.ok()) status = file->identify(want);
  // Its length and allocation must be durable before it gets its name.
  if (status.ok() && file->granularity_ != Granularity::kVolatile && fsync(fd) != 0) {
    status = from_errno("fsync of " + path);
  }
  if (status.ok()) status = file->reserve();
  if (status.ok()) status = file->map(0, file->size_);
  if (!status.ok()) {
    unlink(path.c_str());
    return status;
  }
  *media = std::move(file);
  return {};
}

FileMedia::~FileMedia() {
  guard_.release();
  if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
  close(fd_);
}

// Sets how long this path is, and in which units it may be mapped.
Status FileMedia::measure() {
  struct stat file;
  struct statfs volume;
  if (fstat(fd_, &file) != 0) return from_errno("cannot stat " + path_);
  if (fstatfs(fd_, &volume) != 0) return from_errno("cannot stat the file system of " + path_);
  device_ = S_ISCHR(file.st_mode);
  if (!S_ISREG(file.st_mode) && !device_) {
    return {Code::kInvalid, path_ + " is neither a file nor a device DAX node"};
  }
  unit_ = mapping_unit(file, volume);
  size_ = device_ ? read_from<uint64_t>(sysfs_of(file) + "/size") / unit_ * unit_
                  : static_cast<uint64_t>(file.st_size);
  return {};
}

// Sets what this path is: media, granularity, how to map and to flush.
Status FileMedia::identify(MediaKind want) {
  struct stat file;
  struct statfs volume;
  if (fstat(fd_, &file) != 0) return from_errno("cannot stat " + path_);
  if (fstatfs(fd_, &volume) != 0) return from_errno("cannot stat the file system of " + path_);
  if (size_ == 0) return {Code::kFormat, path_ + " is empty: it was never a store"};

  // In whole units, of which one is what a device DAX node maps at the least.
  constexpr int kSynced = MAP_SHARED_VALIDATE | MAP_SYNC;
  void* probe = mmap(nullptr, unit_, PROT_READ, kSynced, fd_, 0);
  const bool takes_sync = probe != MAP_FAILED;
  if (takes_sync) munmap(probe, unit_);
  // A device has no page cache to bypass, so the flag says nothing of it and may be refused; but
  // there is volatile memory behind such nodes too.
  const std::string below = device_ ? sysfs_of(file) : "";
  const bool of_host = below.find("/virtio") != std::string::npos;  // durable once that is asked
  const bool dax = device_ ? below.find("/ndbus") != std::string::npos && !of_host : takes_sync;
  const bool in_memory = device_ || volume.f_type == TMPFS_MAGIC || volume.f_type == RAMFS_MAGIC ||
                         volume.f_type == HUGETLBFS_MAGIC;
  if (want == MediaKind::kPmem && !dax) {
    return {Code::kInvalid, path_ + " is not persistent memory: " +
                                (device_ ? "no NVDIMM region lies below the device"
                                         : "the kernel refuses MAP_SYNC here")};
  }
  if (want == MediaKind::kTmpfs && !in_memory) {
    return {Code::kInvalid, path_ + " does not lie on tmpfs"};
  }
  kind_ = dax ? MediaKind::kPmem : in_memory ? MediaKind::kTmpfs : MediaKind::kFile;
  if (want == MediaKind::kFile) kind_ = MediaKind::kFile;
  if (want == MediaKind::kEmulated) kind_ = MediaKind::kEmulated;
  emulated_ = want == MediaKind::kEmulated && !dax;
  map_flags_ = takes_sync && kind_ == MediaKind::kPmem ? kSynced : MAP_SHARED;
  // Without a reservation of memory for copies of all pages, of which a reader makes few or none.
  // A device has no private mappings: its readers cannot write to copies of their own.
  if (read_only_ && !device_) map_flags_ = MAP_PRIVATE | MAP_NORESERVE;
  protection_ = read_only_ && device_ ? PROT_READ : PROT_READ | PROT_WRITE;
  switch (kind_) {
    case MediaKind::kPmem:
      granularity_ = caches_are_persistent(file) ? Granularity::kByte : Granularity::kCacheLine;
      break;
    case MediaKind::kEmulated:
      granularity_ = Granularity::kCacheLine;
      RETURN_IF_ERROR(take_settings());
      break;
    case MediaKind::kFile:
      granularity_ = Granularity::kPage;
      flush_method_ = FlushMethod::kMsync;
      break;
    default:
      granularity_ = Granularity::kVolatile;
  }
  if (granularity_ == Granularity::kCacheLine) {
    flush_method_ = best_flush_method();
    if (flush_method_ == FlushMethod::kNone) {
      return {Code::kInvalid, "this processor has no cache write-back that lightckpt knows"};
    }
  }
  return kind_ == MediaKind::kPmem ? ask_pmem2() : Status();
}

// What only libpmem2 tells, where it is there and may look. A reader may go on beside bad blocks:
// every byte that it takes has a checksum, and this is how to get out what is whole.
Status FileMedia::ask_pmem2() {
  const Pmem2* library = nullptr;
  if (!Pmem2::load(&library).ok()) return {};
  uint64_t count = 0;
  if (library->unsafe_shutdowns(fd_, &count).ok()) unsafe_shutdowns_ = count;
  std::vector<BadBlock> bad;
  if (read_only_ || !library->bad_blocks(fd_, &bad).ok() || bad.empty()) return {};
  return {Code::kIo, path_ + " has bad blocks, at bytes " + words_of(bad) +
                         ": it can be opened for reading only until they are repaired"};
}

// Lengths of hugetlbfs go by its pages; elsewhere a file has the length that was asked for.
uint64_t FileMedia::whole_units(uint64_t bytes) const {
  return unit_ == kPage ? bytes : round_up(bytes, unit_);
}

// posix_fallocate gives a clean error now instead of SIGBUS at the first touch later.
Status FileMedia::allocate(uint64_t from, uint64_t to) {
  if (device_) return {Code::kNoSpace, path_ + " is a device and cannot grow to " + mib(to)};
  const int error = posix_fallocate(fd_, static_cast<off_t>(from), static_cast<off_t>(to - from));
  if (error == 0) return {};
  struct statvfs volume = {};
  fstatvfs(fd_, &volume);
  const Status status =
      from_errno("no room for " + path_ + ": " + mib(to - from) + " more are needed, " +
                     mib(uint64_t{volume.f_bavail} * volume.f_frsize) + " are free",
                 error);
  // A partial allocation must not stay: the size is what was there before.
  if (ftruncate(fd_, static_cast<off_t>(from)) != 0) return from_errno("cannot undo the growth");
  return status;
}

Status FileMedia::reserve() {
  // Aligned, so that huge pages can be used where the file system has them.
  const uint64_t alignment = std::max(kHugePage, unit_);
  capacity_ = device_ ? size() : std::max(kReserveMin, size() * kReserveFactor);
  // Where there is less (a large store, a limit), room to grow is given up first.
  for (;; capacity_ = std::max(size(), capacity_ / 2)) {
    reserved_bytes_ = capacity_ + alignment;
    reserved_ = mmap(nullptr, reserved_bytes_, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved_ != MAP_FAILED || capacity_ == size_) break;
  }
  if (reserved_ == MAP_FAILED) {
    reserved_ = nullptr;
    return from_errno("cannot reserve " + mib(reserved_bytes_) + " of address space");
  }
  base_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(reserved_), alignment));
  // A writer's child must not write here. A reader's may read on: its mapping is private.
  if (!read_only_) madvise(reserved_, reserved_bytes_, MADV_DONTFORK);
  return {};
}

Status FileMedia::map(uint64_t from, uint64_t to) {
  void* wanted = base_ + from;
  if (mmap(wanted, to - from, protection_, map_flags_ | MAP_FIXED, fd_, static_cast<off_t>(from)) ==
      MAP_FAILED) {
    return from_errno("cannot map " + path_);
  }
  if (!read_only_) madvise(wanted, to - from, MADV_DONTFORK);
  if (kind_ == MediaKind::kTmpfs) madvise(wanted, to - from, MADV_HUGEPAGE);
  if (!guard_.protect(base_, to, protection_)) {
    return {Code::kIo, path_ + ": the mapping cannot be guarded against SIGBUS"};
  }
  size_ = to;
  return {};
}

Status FileMedia::grow(uint64_t bytes) {
  if (bytes <= size_) return {};
  if (read_only_) return {Code::kAccess, path_ + " is open for reading only"};
  if (bytes > capacity_) {
    return {Code::kNoSpace, path_ + " cannot grow from " + mib(size_) + " to " + mib(bytes) +
                                " while it is open: reopen it with a larger size"};
  }
  const uint64_t before = size_;
  bytes = whole_units(bytes);
  RETURN_IF_ERROR(allocate(before, bytes));
  // The new length must be durable before a slot refers to bytes beyond the old one.
  if (granularity_ != Granularity::kVolatile && fsync(fd_) != 0)
    return from_errno("fsync " + path_);
  return map(before, bytes);
}

bool FileMedia::follow() {
  struct stat file;
  if (!read_only_ || device_ || fstat(fd_, &file) != 0) return false;
  const uint64_t now = static_cast<uint64_t>(file.st_size) / unit_ * unit_;
  return size_ < now && now <= capacity_ && size_ % unit_ == 0 && map(size_, now).ok();
}

Status FileMedia::check() const {
  if (guard_.tripped()) {
    return {Code::kIo,
            path_ + " lost pages under its mapping: it was cut short or its device failed"};
  }
  struct stat file;
  if (fstat(fd_, &file) != 0) return from_errno("cannot stat " + path_);
  if (device_) return {};
  if (file.st_nlink == 0) return {Code::kIo, path_ + " was removed while it was open"};
  if (static_cast<uint64_t>(file.st_size) < size_) {
    return {Code::kIo, path_ + " was cut to " + mib(static_cast<uint64_t>(file.st_size)) +
                           " from " + mib(size_) + " while it was open"};
  }
  return {};
}

void FileMedia::populate(uint64_t offset, uint64_t bytes) {
  {
    std::lock_guard lock(populated_mutex_);
    if (populated_.contains(offset, offset + bytes)) return;
  }
  const uint64_t begin = offset / 4096 * 4096;
  const uint64_t end = std::min(size(), (offset + bytes + 4095) / 4096 * 4096);
  // Only a hint: where the kernel does not know it, pages come by faults as they always did.
  madvise(base_ + begin, end - begin, read_only_ ? MADV_POPULATE_READ : MADV_POPULATE_WRITE);
  std::lock_guard lock(populated_mutex_);
  populated_.add(begin, end);
}

Status FileMedia::sync(uint64_t offset, uint64_t bytes) {
  const uint64_t begin = offset / 4096 * 4096;
  if (msync(base_ + begin, offset + bytes - begin, MS_SYNC) != 0) {
    return from_errno("msync of " + mib(bytes) + " at " + std::to_string(offset) + " in " + path_);
  }
  return {};
}

HeapMedia::HeapMedia(uint64_t bytes, uint64_t capacity, Granularity granularity)
    : capacity_(std::max(bytes, capacity)) {
  base_ = static_cast<std::byte*>(::operator new(capacity_, std::align_val_t{4096}));
  std::memset(base_, 0, capacity_);
  size_ = bytes;
  granularity_ = granularity;
}

HeapMedia::~HeapMedia() { ::operator delete(base_, std::align_val_t{4096}); }

Status HeapMedia::grow(uint64_t bytes) {
  if (bytes > capacity_) {
    return {Code::kNoSpace, "heap media holds " + mib(capacity_) + ", not " + mib(bytes)};
  }
  size_ = std::max(size(), bytes);
  return {};
}

}  // namespace lightckpt
