// The process's table of lock files, and fcntl. See lock.h.
#include "lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <mutex>
#include <vector>

namespace lightckpt {
namespace {

struct LockFile {
  dev_t device;
  ino_t inode;
  int fd;
  bool writer = false;
  std::array<uint32_t, kLockSlotsMax> pins{};
  uint64_t sealed = 0;  // bit per slot
};

// One table for the process, because record locks are the process's. A forked child starts with a
// copy that describes its parent, so the table remembers whose it is.
std::mutex table_mutex;
std::vector<LockFile> table;
pid_t table_owner = 0;

void adopt_table() {
  if (table_owner == getpid()) return;
  for (LockFile& file : table) {
    file.writer = false;
    file.pins.fill(0);
    file.sealed = 0;
  }
  table_owner = getpid();
}

struct flock range_of(short type, off_t byte) {
  struct flock range = {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = byte;
  range.l_len = 1;
  return range;
}

bool try_lock(int fd, short type, off_t byte) {
  struct flock range = range_of(type, byte);
  return fcntl(fd, F_SETLK, &range) == 0;
}

pid_t holder_of(int fd, off_t byte) {
  struct flock range = range_of(F_WRLCK, byte);
  if (fcntl(fd, F_GETLK, &range) != 0 || range.l_type == F_UNLCK) return 0;
  return range.l_pid;
}

// The table's entry for a lock file. It is looked up before it is opened: a second descriptor could
// not be closed again without dropping every lock this process has on the file.
int find_or_open(const std::string& path, bool writer, Status* status) {
  struct stat file;
  if (stat(path.c_str(), &file) == 0) {
    for (size_t i = 0; i < table.size(); ++i) {
      if (table[i].device == file.st_dev && table[i].inode == file.st_ino) {
        return static_cast<int>(i);
      }
    }
  }
  int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  // A reader may lack the right to write; a shared lock needs only the right to read.
  if (fd < 0 && !writer && (errno == EACCES || errno == EPERM || errno == EROFS)) {
    const int refused = errno;
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) errno = refused;
  }
  if (fd < 0 || fstat(fd, &file) != 0) {
    *status = from_errno("cannot open the lock file " + path);
    return -1;
  }
  table.push_back({file.st_dev, file.st_ino, fd, false, {}, 0});
  return static_cast<int>(table.size()) - 1;
}

}  // namespace

Status StoreLock::acquire(const std::string& store_path, bool writer) {
  std::lock_guard lock(table_mutex);
  adopt_table();
  Status status;
  // By the store's own name: two links to one store must not have a lock file each.
  char* resolved = realpath(store_path.c_str(), nullptr);
  const std::string real_path = resolved != nullptr ? resolved : store_path;
  std::free(resolved);
  const int entry = find_or_open(real_path + ".lock", writer, &status);
  if (entry < 0) {
    // Where a reader can make no lock file and there is none, there is no writer either.
    if (!writer && status.code() == Code::kAccess) return {};
    return status;
  }
  if (writer) {
    if (table[entry].writer) {
      return {Code::kBusy, store_path + " is already open for writing in this process (pid " +
                               std::to_string(getpid()) + ")"};
    }
    if (!try_lock(table[entry].fd, F_WRLCK, 0)) {
      if (errno == EBADF) {  // opened by a reader of this process, which may not write to it
        return {Code::kAccess, "the lock file of " + store_path + " may only be read: a writer " +
                                   "needs the right to write it"};
      }
      return {Code::kBusy, store_path + " is open for writing in process " +
                               std::to_string(holder_of(table[entry].fd, 0))};
    }
    table[entry].writer = true;
  }
  entry_ = entry;
  writer_ = writer;
  return {};
}

void StoreLock::release() {
  if (entry_ < 0) return;
  for (uint32_t slot = 0; slot < kLockSlotsMax; ++slot) unpin_all(slot);
  std::lock_guard lock(table_mutex);
  if (writer_ && table_owner == getpid()) {
    try_lock(table[entry_].fd, F_UNLCK, 0);
    table[entry_].writer = false;
  }
  entry_ = -1;
}

Status StoreLock::pin(uint32_t slot) {
  CHECK(slot < kLockSlotsMax);
  std::lock_guard lock(table_mutex);
  if (entry_ >= 0) {
    adopt_table();
    LockFile& file = table[entry_];
    if ((file.sealed >> slot & 1u) != 0 ||
        (file.pins[slot] == 0 && !try_lock(file.fd, F_RDLCK, 1 + slot))) {
      return {Code::kBusy, "version slot " + std::to_string(slot) + " is being retired"};
    }
    ++file.pins[slot];
  }
  ++pins_[slot];
  return {};
}

void StoreLock::unpin(uint32_t slot) {
  if (!pinned_here(slot)) return;
  std::lock_guard lock(table_mutex);
  --pins_[slot];
  if (entry_ < 0 || table_owner != getpid()) return;
  if (--table[entry_].pins[slot] == 0) try_lock(table[entry_].fd, F_UNLCK, 1 + slot);
}

uint32_t StoreLock::unpin_all(uint32_t slot) {
  const uint32_t count = pins_[slot];
  for (uint32_t i = 0; i < count; ++i) unpin(slot);
  return count;
}

bool StoreLock::pinned_elsewhere(uint32_t slot) const {
  if (entry_ < 0) return false;
  std::lock_guard lock(table_mutex);
  if (table[entry_].pins[slot] > pins_[slot]) return true;
  return holder_of(table[entry_].fd, 1 + slot) != 0;
}

bool StoreLock::try_seal(uint32_t slot) {
  if (pinned_here(slot)) return false;
  if (entry_ < 0) return true;
  std::lock_guard lock(table_mutex);
  LockFile& file = table[entry_];
  if (file.pins[slot] > 0 || !try_lock(file.fd, F_WRLCK, 1 + slot)) return false;
  file.sealed |= uint64_t{1} << slot;
  return true;
}

void StoreLock::unseal(uint32_t slot) {
  if (entry_ < 0) return;
  std::lock_guard lock(table_mutex);
  try_lock(table[entry_].fd, F_UNLCK, 1 + slot);
  table[entry_].sealed &= ~(uint64_t{1} << slot);
}

}  // namespace lightckpt
