// What a path is, found by asking the kernel: how long, how to map and to flush. See file_media.h.
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include <fstream>

#include "file_media.h"
#include "pmem2.h"

namespace lightckpt {
namespace {

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
  return kPageUnit;
}

}  // namespace

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
  map_flags_ = takes_sync && kind_ == MediaKind::kPmem && !read_only_ ? kSynced : MAP_SHARED;
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

}  // namespace lightckpt
