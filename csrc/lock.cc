// fcntl on the store and on its lock file. See lock.h.
#include "lock.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "holder.h"

namespace lightckpt {
namespace {

constexpr uint32_t kWritersByte = 0;
constexpr int kTriesMax = 1000;
constexpr mode_t kWritable = S_IWUSR | S_IWGRP | S_IWOTH;

constexpr uint32_t byte_of(uint32_t slot) { return 1 + slot; }

struct flock range_of(short type, off_t first, off_t bytes) {
  struct flock range = {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = first;
  range.l_len = bytes;
  return range;
}

// Only those who may write a store may open its lock file, and so lock it: each class of users that
// has the right to write gets the right to read as well, which earlier releases need.
mode_t lock_mode(mode_t mode) { return (mode & kWritable) | (mode & kWritable) << 1; }

}  // namespace

bool StoreLock::File::set(short type, uint32_t byte) {
  struct flock range = range_of(type, first_ + byte, 1);
  return fcntl(descriptor_.get(), F_OFD_SETLK, &range) == 0;
}

struct flock StoreLock::File::in_the_way(uint32_t byte) const {
  struct flock range = range_of(F_WRLCK, first_ + byte, 1);
  if (fcntl(descriptor_.get(), F_OFD_GETLK, &range) != 0) range.l_type = F_UNLCK;
  return range;
}

int StoreLock::File::take_writers(pid_t* holder_pid) {
  // What was in the way may be gone before it is looked at; then the lock can be had.
  for (int i = 0; i < kTriesMax; ++i) {
    if (set(F_WRLCK, kWritersByte)) return F_WRLCK;
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EACCES) return -errno;
    const struct flock other = in_the_way(kWritersByte);
    if (other.l_type == F_RDLCK) return F_RDLCK;
    if (other.l_type == F_UNLCK) continue;
    // Minus one is an open file description, and 0 a process that this one cannot see.
    *holder_pid = std::max(other.l_pid, 0);
    break;
  }
  return F_UNLCK;
}

void StoreLock::File::release() {
  if (!is_open()) return;
  // A child that was made without fork's handlers may have the description still.
  struct flock all = range_of(F_UNLCK, first_, 0);
  fcntl(descriptor_.get(), F_OFD_SETLK, &all);
  descriptor_.close();
}

Status StoreLock::take_name(const std::string& path, bool* held) {
  *held = false;
  // Made without any right but to write, which is all that this process needs: nobody gets to read
  // it before it has the mode that it is to have.
  const int flags = O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK;
  if (name_.descriptor().open(path + ".lock", flags, kWritable) != 0) return {};
  struct stat file = {}, store = {};
  const bool exists = stat(path.c_str(), &store) == 0;
  // One that somebody else has put there says nothing of the store; nor does any other file, or
  // store, that has this name.
  if (fstat(name_.descriptor().get(), &file) != 0 || !S_ISREG(file.st_mode) ||
      !may_be_lock_file(path + ".lock", file) ||
      (file.st_uid != geteuid() && (!exists || file.st_uid != store.st_uid))) {
    name_.release();
    return {};
  }
  const mode_t mode = lock_mode(exists ? store.st_mode : file.st_mode);
  if (file.st_uid == geteuid() && file.st_nlink == 1 && (file.st_mode & ACCESSPERMS) != mode) {
    (void)fchmod(name_.descriptor().get(), mode);  // else it is as it was
  }
  const int taken = name_.take_writers(&holder_pid_);
  *held = taken == F_WRLCK;
  if (*held) {
    sign_lock_file(name_.descriptor().get());
  } else {
    name_.release();
  }
  return taken == F_UNLCK ? Status(Code::kBusy, "") : Status();
}

Status StoreLock::open(const std::string& path, bool writer) {
  store_.release();
  // Not a store: a FIFO would wait for its other end.
  const int flags = (writer ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_NONBLOCK;
  if (const int error = store_.descriptor().open(path, flags); error != 0) {
    return from_errno("cannot open " + path + (writer ? " for writing" : ""), error);
  }
  struct stat file = {};
  if (fstat(store_.descriptor().get(), &file) != 0) return from_errno("cannot stat " + path);
  if (!S_ISREG(file.st_mode) && !S_ISCHR(file.st_mode)) {
    return {Code::kInvalid, path + " is neither a file nor a device DAX node"};
  }
  path_ = path;
  device_ = file.st_dev;
  inode_ = file.st_ino;
  if (!writer) return {};
  const int taken = store_.take_writers(&holder_pid_);
  if (taken < 0) return from_errno("cannot lock " + path, -taken);
  alone_ = taken == F_WRLCK;
  return taken == F_UNLCK ? Status(Code::kBusy, "") : Status();
}

void StoreLock::release() {
  const MutexLock lock(mutex_);
  for (auto& count : pins_) count = 0;
  sealed_ = 0;
  store_.release();
  // While it is held still, or what is cut off may be the next holder's. In a child it is not open.
  if (name_.is_open()) (void)!ftruncate(name_.descriptor().get(), 0);
  name_.release();
  path_.clear();
}

bool StoreLock::is_of(int descriptor) const {
  struct stat file = {};
  return fstat(descriptor, &file) == 0 && file.st_dev == device_ && file.st_ino == inode_;
}

Status StoreLock::check() {
  if (path_.empty()) return {};
  struct stat named = {};
  if (stat(path_.c_str(), &named) != 0 && errno != ENOENT && errno != ENOTDIR) {
    return {Code::kIo, "cannot look at " + path_ + ": " + std::strerror(errno)};
  }
  if (named.st_dev != device_ || named.st_ino != inode_) {
    return {Code::kLost, path_ + " was renamed, removed or replaced while it was open"};
  }
  if (alone_) return {};
  const int taken = store_.take_writers(&holder_pid_);
  if (taken == F_UNLCK) {
    return {Code::kLost, "another process has opened " + path_ + " for writing"};
  }
  alone_ = taken == F_WRLCK;
  return {};
}

Status StoreLock::pin(uint32_t slot) {
  CHECK(slot < kLockSlotsMax);
  const MutexLock lock(mutex_);
  const Status retired(Code::kBusy, "version slot " + std::to_string(slot) + " is being retired");
  if ((sealed_ >> slot & 1u) != 0) return retired;
  if (is_open() && pins_[slot] == 0 && !store_.set(F_RDLCK, byte_of(slot))) {
    if (errno == EAGAIN || errno == EACCES) return retired;
    return from_errno("cannot lock version slot " + std::to_string(slot) + " of " + path_);
  }
  ++pins_[slot];
  return {};
}

void StoreLock::unpin(uint32_t slot) {
  const MutexLock lock(mutex_);
  if (!pinned_here(slot)) return;
  if (--pins_[slot] == 0 && is_open()) store_.set(F_UNLCK, byte_of(slot));
}

uint32_t StoreLock::unpin_all(uint32_t slot) {
  const uint32_t count = pins_[slot];
  for (uint32_t i = 0; i < count; ++i) unpin(slot);
  return count;
}

bool StoreLock::pinned_elsewhere(uint32_t slot) const {
  const auto is_read = [&](const File& file) {
    return file.is_open() && file.in_the_way(byte_of(slot)).l_type == F_RDLCK;
  };
  return is_read(store_) || is_read(name_);
}

bool StoreLock::try_seal(uint32_t slot) {
  const MutexLock lock(mutex_);
  if (pinned_here(slot)) return false;
  if (is_open() && !store_.set(F_WRLCK, byte_of(slot))) return false;
  if (name_.is_open() && !name_.set(F_WRLCK, byte_of(slot))) {
    store_.set(F_UNLCK, byte_of(slot));
    return false;
  }
  sealed_ |= uint64_t{1} << slot;
  return true;
}

void StoreLock::unseal(uint32_t slot) {
  const MutexLock lock(mutex_);
  if (is_open()) store_.set(F_UNLCK, byte_of(slot));
  if (name_.is_open()) name_.set(F_UNLCK, byte_of(slot));
  sealed_ &= ~(uint64_t{1} << slot);
}

}  // namespace lightckpt
