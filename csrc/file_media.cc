// Opening, growing and checking a file that is mapped. See file_media.h.
#include "file_media.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "file_space.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace lightckpt {
namespace {

constexpr uint64_t kReserveMin = 256ull << 30;
constexpr uint64_t kReserveMinRead = 64ull
                                     << 30;  // of which a reader has two, and may be one of many
constexpr uint64_t kReserveFactor = 16;

std::string words_of_free_space(int fd) {
  uint64_t bytes = 0;
  return free_space(fd, &bytes) ? mib(bytes) : "an unknown number of bytes";
}

// What was to be written back and failed is not known to be there, whatever a later call says. Only
// a full file system is one that comes back.
Status lost_unless_no_space(const std::string& what, int error) {
  const Status status = from_errno(what, error);
  return {error == ENOSPC || error == EDQUOT ? Code::kNoSpace : Code::kLost, status.message()};
}

}  // namespace

Status FileMedia::open(const std::string& path, MediaKind want, bool read_only,
                       std::unique_ptr<Media>* media) {
  const int flags = (read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC;
  const int fd = uninterrupted([&] { return ::open(path.c_str(), flags); });
  if (fd < 0) return from_errno("cannot open " + path);
  std::unique_ptr<FileMedia> file = make(path, fd, want);
  file->read_only_ = read_only;
  RETURN_IF_ERROR(file->measure());
  RETURN_IF_ERROR(file->identify(want));
  if (!read_only) RETURN_IF_ERROR(file->fill_holes());
  RETURN_IF_ERROR(file->reserve());
  RETURN_IF_ERROR(file->map(file->size_));
  *media = std::move(file);
  return {};
}

Status FileMedia::create(const std::string& path, MediaKind want, uint64_t bytes,
                         std::unique_ptr<Media>* media) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
  const int fd = uninterrupted([&] { return ::open(path.c_str(), kFlags, 0666); });
  if (fd < 0) return from_errno("cannot create " + path);
  std::unique_ptr<FileMedia> file = make(path, fd, want);
  Status status = file->measure();
  if (status.ok()) status = file->allocate(0, file->whole_units(bytes));
  if (status.ok()) status = file->measure();
  if (status.ok()) status = file->identify(want);
  // Its length and allocation must be durable before it gets its name.
  if (status.ok() && file->granularity_ != Granularity::kVolatile &&
      uninterrupted([&] { return fsync(fd); }) != 0) {
    status = from_errno("fsync of " + path);
  }
  if (status.ok()) status = file->reserve();
  if (status.ok()) status = file->map(file->size_);
  if (!status.ok()) {
    unlink(path.c_str());
    return status;
  }
  *media = std::move(file);
  return {};
}

FileMedia::~FileMedia() { close(fd_); }

// Lengths of hugetlbfs go by its pages; elsewhere a file has the length that was asked for.
uint64_t FileMedia::whole_units(uint64_t bytes) const {
  return unit_ == kPageUnit ? bytes : (bytes + unit_ - 1) / unit_ * unit_;
}

// posix_fallocate gives a clean error now instead of SIGBUS at the first touch later.
Status FileMedia::allocate(uint64_t from, uint64_t to) {
  if (device_) return {Code::kNoSpace, path_ + " is a device and cannot grow to " + mib(to)};
  struct stat file;
  if (fstat(fd_, &file) != 0) return from_errno("cannot stat " + path_);
  const auto before = static_cast<uint64_t>(file.st_size);
  const int error =
      is_beyond(fd_, to - from) ? ENOSPC : allocate_in_pieces(fd_, Allocation::kAny, from, to);
  if (error == 0) return {};
  const Status status =
      from_errno("no room for " + path_ + ": " + mib(to - from) + " more are needed, " +
                     words_of_free_space(fd_) + " are free",
                 error);
  // A partial allocation must not stay: the length is what was there before.
  if (before < to &&
      uninterrupted([&] { return ftruncate(fd_, static_cast<off_t>(before)); }) != 0) {
    return from_errno("cannot undo the growth of " + path_);
  }
  return status;
}

// A sparse copy of a store would meet a full file system at any store to a page that it lacks.
Status FileMedia::fill_holes() {
  struct stat file;
  if (device_) return {};
  if (fstat(fd_, &file) != 0) return from_errno("cannot stat " + path_);
  const uint64_t held = static_cast<uint64_t>(file.st_blocks) * 512;
  if (held >= size_) return {};
  const int error =
      is_beyond(fd_, size_ - held) ? ENOSPC : allocate_in_pieces(fd_, Allocation::kReal, 0, size_);
  // Where holes cannot be filled so (a file system that compresses), nothing is promised of them.
  if (error == 0 || error == EOPNOTSUPP) return {};
  return from_errno("no room for the holes of " + path_ + ", a sparse file: " + mib(size_ - held) +
                        " more are needed, " + words_of_free_space(fd_) + " are free",
                    error);
}

Status FileMedia::reserve() {
  // Without a reservation of memory for copies of all pages, of which a reader makes few or none.
  // A device has no private mappings: its readers cannot write to copies of their own.
  const bool has_private = read_only_ && !device_;
  Mapping::How how;
  how.fd = fd_;
  how.protection = read_only_ ? PROT_READ : PROT_READ | PROT_WRITE;
  how.flags = map_flags_;
  how.unit = unit_;
  // A writer's child must not write here. A reader's may read on.
  how.inherited = read_only_;
  how.huge_pages = kind_ == MediaKind::kTmpfs;
  how.cuttable = !device_;
  Mapping::How own = how;
  own.protection = PROT_READ | PROT_WRITE;
  own.flags = MAP_PRIVATE | MAP_NORESERVE;
  const uint64_t least = read_only_ ? kReserveMinRead : kReserveMin;
  capacity_ = device_ ? size() : std::max(least, size() * kReserveFactor);
  // Where there is less (a large store, a limit), room to grow is given up first.
  for (;; capacity_ = std::max(size(), capacity_ / 2)) {
    if (mapping_.reserve(how, capacity_) && (!has_private || private_.reserve(own, capacity_))) {
      break;
    }
    if (capacity_ == size_) {
      return from_errno("cannot reserve " + mib(capacity_) + " of address space for " + path_);
    }
  }
  base_ = mapping_.base();
  return {};
}

Status FileMedia::map(uint64_t to) {
  if (!mapping_.extend(to) || (private_.base() != nullptr && !private_.extend(to))) {
    return from_errno("cannot map " + path_);
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
  if (granularity_ != Granularity::kVolatile && uninterrupted([&] { return fsync(fd_); }) != 0) {
    const Status status = lost_unless_no_space("fsync of " + path_ + ", which has grown", errno);
    (void)ftruncate(fd_, static_cast<off_t>(before));  // what grew is not needed, and not mapped
    return status;
  }
  return map(bytes);
}

bool FileMedia::follow() {
  struct stat file;
  if (!read_only_ || device_ || fstat(fd_, &file) != 0) return false;
  const uint64_t now = static_cast<uint64_t>(file.st_size) / unit_ * unit_;
  return size_ < now && now <= capacity_ && map(now).ok();
}

std::byte* FileMedia::private_view() {
  SigbusGuard::arm();
  return private_.base() != nullptr ? private_.base() : base_;
}

void FileMedia::forget_private(uint64_t offset, uint64_t bytes) {
  if (private_.base() != nullptr) private_.drop(offset, bytes);
}

// Asked before an attempt begins, which looks at what it was shown before: armed for that.
bool FileMedia::shaken() const {
  SigbusGuard::arm();
  return Media::shaken() || mapping_.guard().trips() > 0;
}

Status FileMedia::check() const {
  SigbusGuard::arm();
  for (const Mapping* mapping : {&mapping_, &private_}) {
    if (mapping->guard().trips() > 0) return why_tripped(mapping->guard());
  }
  struct stat file;
  if (fstat(fd_, &file) != 0) return from_errno("cannot stat " + path_);
  if (device_) return {};
  if (file.st_nlink == 0) return {Code::kLost, path_ + " was removed while it was open"};
  if (static_cast<uint64_t>(file.st_size) < size_) {
    return {Code::kLost, path_ + " was cut to " + mib(static_cast<uint64_t>(file.st_size)) +
                             " from " + mib(size_) + " while it was open"};
  }
  return {};
}

// A page was replaced by one that is nobody's. Is it gone, or was there no room for it just then?
Status FileMedia::why_tripped(const SigbusGuard& guard) const {
  const std::string lost = path_ + " lost pages under its mapping: ";
  if (guard.was_cut()) return {Code::kLost, lost + "it was cut short"};
  std::byte byte;
  const auto at = static_cast<off_t>(guard.last_trip());
  const ssize_t got = uninterrupted([&] { return pread(fd_, &byte, sizeof(byte), at); });
  if (device_ || got != sizeof(byte)) {
    const std::string why = device_ || got == 0 ? "" : std::string(": ") + std::strerror(errno);
    return {Code::kLost, lost + "its device failed" + why};
  }
  // A writer has it again as soon as it recovers. A reader meets this where a hole is filled by who
  // reads it, as on tmpfs.
  const std::string again = read_only_ ? "; open it again when there is more" : "";
  return {Code::kNoSpace, "no space for " + path_ + ": its file system had none for a page that " +
                              "was touched, though the file is whole; " + words_of_free_space(fd_) +
                              " are free now" + again};
}

Status FileMedia::recover() {
  if (const Status status = check(); status.code() == Code::kLost) return status;
  if (mapping_.guard().trips() > 0) {
    if (!mapping_.renew()) return from_errno("cannot map " + path_ + " anew");
    const MutexLock lock(populated_mutex_);
    populated_ = {};
  }
  return Media::recover();
}

void FileMedia::populate(uint64_t offset, uint64_t bytes) {
  {
    const MutexLock lock(populated_mutex_);
    if (populated_.contains(offset, offset + bytes)) return;
  }
  const uint64_t begin = offset / 4096 * 4096;
  const uint64_t end = std::min(size(), (offset + bytes + 4095) / 4096 * 4096);
  // Only a hint: where the kernel does not know it, pages come by faults as they always did.
  madvise(base_ + begin, end - begin, read_only_ ? MADV_POPULATE_READ : MADV_POPULATE_WRITE);
  const MutexLock lock(populated_mutex_);
  populated_.add(begin, end);
}

Status FileMedia::sync(uint64_t offset, uint64_t bytes) {
  const uint64_t begin = offset / 4096 * 4096;
  if (uninterrupted([&] { return msync(base_ + begin, offset + bytes - begin, MS_SYNC); }) == 0) {
    return {};
  }
  return lost_unless_no_space(
      "msync of " + mib(bytes) + " at " + std::to_string(offset) + " in " + path_, errno);
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
