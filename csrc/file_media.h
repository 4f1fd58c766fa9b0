// FileMedia: a file or device DAX node as media; HeapMedia: this process's memory, for tests.
//
// What a path is, is found by trying, not by its name: a mapping with MAP_SYNC is persistent memory
// (the kernel refuses the flag everywhere else), as is a device DAX node of an NVDIMM region;
// tmpfs, hugetlbfs and other device DAX nodes are memory that survives the process only, the rest
// is a plain file that needs msync. Address space is reserved ahead, so a store that grows keeps
// its pointers. Mappings are not inherited by forked children.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "media.h"
#include "sigbus.h"

namespace lightckpt {

class FileMedia final : public Media {
 public:
  // Maps an existing file or device. Read-only: a private mapping, so that a reader may write to
  // its own copy of a page without changing the store; of a device, a shared one that cannot be
  // written. For writing, known bad blocks are refused: libpmem2 names them, where it is installed.
  static Status open(const std::string& path, MediaKind want, bool read_only,
                     std::unique_ptr<Media>* media);
  // Makes a new file of `bytes` allocated bytes at `path`, which must not exist.
  static Status create(const std::string& path, MediaKind want, uint64_t bytes,
                       std::unique_ptr<Media>* media);
  ~FileMedia() override;

  Status grow(uint64_t bytes) override;
  bool follow() override;
  Status check() const override;
  void populate(uint64_t offset, uint64_t bytes) override;
  int descriptor() const override { return fd_; }
  void set_path(const std::string& path) override { path_ = path; }
  std::optional<uint64_t> unsafe_shutdowns() const override { return unsafe_shutdowns_; }

 protected:
  Status sync(uint64_t offset, uint64_t bytes) override;

 private:
  FileMedia(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  Status measure();
  Status identify(MediaKind want);
  Status ask_pmem2();
  uint64_t whole_units(uint64_t bytes) const;
  Status allocate(uint64_t from, uint64_t to);
  Status reserve();
  Status map(uint64_t from, uint64_t to);

  std::string path_;
  int fd_;
  bool read_only_ = false;
  bool device_ = false;
  int map_flags_ = 0;
  int protection_ = 0;
  uint64_t unit_ = 0;  // of offsets and lengths of mappings
  std::optional<uint64_t> unsafe_shutdowns_;
  void* reserved_ = nullptr;
  uint64_t reserved_bytes_ = 0;
  uint64_t capacity_ = 0;  // reserved from base_ on
  SigbusGuard guard_;
  std::mutex populated_mutex_;
  RangeSet populated_;
};

// Fixed capacity: grows within it, and refuses beyond.
class HeapMedia final : public Media {
 public:
  explicit HeapMedia(uint64_t bytes, uint64_t capacity = 0,
                     Granularity granularity = Granularity::kVolatile);
  ~HeapMedia() override;

  Status grow(uint64_t bytes) override;
  Status check() const override { return {}; }
  void populate(uint64_t, uint64_t) override {}

 protected:
  Status sync(uint64_t, uint64_t) override { return {}; }

 private:
  uint64_t capacity_;
};

}  // namespace lightckpt
