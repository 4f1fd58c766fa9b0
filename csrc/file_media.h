// FileMedia: a file or device DAX node as media; HeapMedia: this process's memory, for tests.
//
// What a path is, is found by trying, not by its name: a mapping with MAP_SYNC is persistent memory
// (the kernel refuses the flag everywhere else), as is a device DAX node of an NVDIMM region;
// tmpfs, hugetlbfs and other device DAX nodes are memory that survives the process only, the rest
// is a plain file that needs msync. Address space is reserved ahead, so a store that grows keeps
// its pointers. A writer's mapping is not inherited by forked children.
//
// A reader has two mappings: one that shows the store and cannot be written, from which all is
// read and verified; and a private one, for who wants to write to a copy of his own (private_view).
//
// A page that the file cannot give is replaced (sigbus.h), and check() says what that means: kLost
// where the file was cut, removed or cannot be read; kNoSpace where it is all there, and its file
// system had no block for a page (one that copies on write, for a page that was written; tmpfs, for
// a hole that was read). That one passes: recover() maps the file anew.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mapping.h"
#include "media.h"

namespace lightckpt {

inline constexpr uint64_t kPageUnit = 4096;

class FileMedia : public Media {
 public:
  // Maps an existing file or device. For writing, known bad blocks are refused (libpmem2 names
  // them, where it is installed), and what a sparse copy has left out is allocated first: kNoSpace
  // where there is no room for it.
  static Status open(const std::string& path, MediaKind want, bool read_only,
                     std::unique_ptr<Media>* media);
  // Makes a new file of `bytes` allocated bytes at `path`, which must not exist.
  static Status create(const std::string& path, MediaKind want, uint64_t bytes,
                       std::unique_ptr<Media>* media);
  ~FileMedia() override;

  Status grow(uint64_t bytes) override;
  bool follow() override;
  Status check() const override;
  bool shaken() const override;
  Status recover() override;
  void populate(uint64_t offset, uint64_t bytes) override;
  std::byte* private_view() override;
  void forget_private(uint64_t offset, uint64_t bytes) override;
  int descriptor() const override { return fd_; }
  void set_path(const std::string& path) override { path_ = path; }
  std::optional<uint64_t> unsafe_shutdowns() const override { return unsafe_shutdowns_; }

 protected:
  FileMedia(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  Status sync(uint64_t offset, uint64_t bytes) override;
  // What only an emulated one has: how slow it is to be.
  virtual Status take_settings() { return {}; }

 private:
  // An EmulatedMedia where that is wanted; defined beside it.
  static std::unique_ptr<FileMedia> make(std::string path, int fd, MediaKind want);
  Status measure();
  Status identify(MediaKind want);
  Status ask_pmem2();
  uint64_t whole_units(uint64_t bytes) const;
  Status allocate(uint64_t from, uint64_t to);
  Status fill_holes();
  Status reserve();
  Status map(uint64_t to);
  Status why_tripped(const SigbusGuard& guard) const;

  std::string path_;
  int fd_;
  bool read_only_ = false;
  bool device_ = false;
  int map_flags_ = 0;
  uint64_t unit_ = 0;  // of offsets and lengths of mappings
  std::optional<uint64_t> unsafe_shutdowns_;
  uint64_t capacity_ = 0;  // reserved from base_ on
  Mapping mapping_;
  Mapping private_;  // a reader's of a file
  Mutex populated_mutex_;
  RangeSet populated_ GUARDED_BY(populated_mutex_);
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
