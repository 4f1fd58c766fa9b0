// Store: versions on one media. Invariants:
//
//   1. A valid slot's version is durable: its area and manifest are drained before the slot is
//      written. So opening reads slots and manifests, never data.
//   2. The latest version, by (generation, version), is only replaced by a newer one that is
//      durable: begin never touches an area that a kept or pinned version reaches.
//   3. A slot is durably retired before the first byte of what it reaches is overwritten.
//   4. What is used is what valid slots reach; nothing else says so.
//   5. Of a change that failed it is unknown whether it is durable. So nothing is built on the
//      slots after it until all of them have been written anew and drained (repair). A media that
//      is lost says so (kLost), and then there is no commit and no retiring any more.
//   6. A writer goes on only while its store has its name, and its token stands in it (lock.h).
//
// Two ways to publish: commit (a new version) and rebase (an older version again, in a new
// generation); each is one 64-byte line. The double-slot idea is LMDB's (mdb.c, meta pages); here
// slots are many, and carry checksums because a line may tear at any of its 8-byte words.
//
// Threads: versions, view and locate from any; the rest from one at a time, except that commit may
// run on another thread than begin.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator.h"
#include "catalog.h"
#include "format.h"
#include "holder.h"
#include "lock.h"
#include "media.h"

namespace lightckpt {

struct StoreOptions {
  bool read_only = false;
  bool create = false;
  MediaKind media = MediaKind::kAuto;
  uint32_t slots = 64;  // readers may pin as many versions, but for the kept ones and two more
  uint64_t bytes = 0;
  // Where a new store has its slots, lines if it is not said; an older one must be as is said.
  std::optional<CatalogKind> catalog;
};

struct Version {
  Slot slot = {};
  uint32_t index = 0;  // of the slot
  std::shared_ptr<const Layout> layout;
  Bytes blob;
  Status damage;  // not ok: listed, but can be neither loaded nor kept
};

// A version that is being made.
struct Attempt {
  Slot slot = {};  // without version, record and checksums
  uint32_t index = 0;
  std::shared_ptr<const Layout> layout;
};

class Store {
 public:
  static Status open(const std::string& path, const StoreOptions& options,
                     std::unique_ptr<Store>* store);
  // The same on a media at hand, formatted if `format`. Without a path there is no lock. Without a
  // catalog the slots are the media's.
  static Status open(std::unique_ptr<Media> media, const StoreOptions& options, bool format,
                     std::unique_ptr<Store>* store, std::unique_ptr<Catalog> catalog = nullptr);

  ~Store();

  Media& media() { return *media_; }
  // For whoever looks at the media after this store is gone.
  std::shared_ptr<Media> share_media() const { return media_; }
  const Header& header() const { return header_; }
  bool read_only() const { return read_only_; }
  uint64_t free_bytes() const;
  // How often the media has lost power, since the store was made, before it had written what it
  // held; 0 where that is not known. Damage that is found is then no riddle.
  uint64_t unsafe_shutdowns() const;

  // Newest first. A reader sees what the writer has committed since.
  std::vector<Version> versions();
  Status find(uint64_t version, Version* found);
  // Its record: one checksum per chunk, and the host state, as they lie on the media.
  Status read_record(const Version& version, const uint32_t** table, Bytes* host);
  bool pinned_here(uint32_t index) const { return lock_.pinned_here(index); }
  bool pinned_elsewhere(uint32_t index) const { return lock_.pinned_elsewhere(index); }

  Status begin(uint64_t step, uint32_t keep, std::vector<uint64_t> extents, Bytes blob,
               uint64_t host_bytes, Attempt* attempt);
  // Makes the attempt a version: record, drain, slot, drain. All chunks must have been copied and
  // fenced by the threads that copied them. Fills in the record's head; allocates nothing, but for
  // messages.
  Status commit(const Attempt& attempt, RecordFront&& record, Bytes host);
  Status rebase(uint64_t version);
  Status pin(uint64_t version, bool pinned);
  // An extent's bytes, which a reader may write to without changing the store. Pin it first.
  Status locate(uint64_t version, uint32_t extent, std::span<std::byte>* bytes);

 private:
  Store() = default;
  static uint64_t least_bytes(const StoreOptions& options);
  static Status format(Media* media, const StoreOptions& options);
  // These set media_ and take lock_. `made` is false where another process made it first.
  Status create(const std::string& path, const StoreOptions& options, bool holds_name, bool* made);
  Status open_path(const std::string& path, const StoreOptions& options);
  Status open_file(const std::string& path, const StoreOptions& options);
  Status format_device(const std::string& path, const StoreOptions& options);
  Status busy(const std::string& path, MediaKind kind) const;
  Status claim();
  bool holds_token() const;
  Status check_hold() REQUIRES(mutex_);
  Status start(const std::string& path, const StoreOptions& options);
  Status open_catalog(const std::string& path, const StoreOptions& options);
  Status scan() REQUIRES(mutex_);
  Status read_manifest(const std::vector<Version>& seen, Version* version) const;
  Status secure_slots();
  Status repair() REQUIRES(mutex_);
  Status keep_lost(Status status) REQUIRES(mutex_);
  bool has_pin_on(const Version& version) const;
  void forget_private(const Version& version) REQUIRES(mutex_);
  bool read_slot(uint32_t index, Slot* slot) const;
  void sort_versions() REQUIRES(mutex_);
  uint64_t newest() const REQUIRES(mutex_);  // the highest number in a slot; 0 where there is none
  Status write_slot(uint32_t index, const Slot& slot) REQUIRES(mutex_);
  Status retire(const std::vector<uint32_t>& indexes, uint64_t manifest_in_use = 0)
      REQUIRES(mutex_);
  Status clear(uint32_t index, uint64_t manifest_in_use = 0) REQUIRES(mutex_);
  std::optional<uint32_t> free_slot() const REQUIRES(mutex_);
  std::vector<Version> survivors(uint32_t keep, std::vector<uint32_t>* retired) REQUIRES(mutex_);
  Status too_many_pinned(const std::vector<Version>& kept, uint32_t keep) const;
  Status may_begin(uint32_t keep) REQUIRES(mutex_);
  Status give_up(std::optional<uint32_t>* slot) REQUIRES(mutex_);
  Status lay_out(uint64_t step, std::vector<uint64_t> extents, Bytes blob, uint64_t host_bytes,
                 Attempt* attempt, std::vector<std::byte>* manifest) const REQUIRES(mutex_);
  Status make_room(uint32_t keep, Bytes manifest, Attempt* attempt) REQUIRES(mutex_);
  Status take_room(const std::vector<Version>& kept, uint32_t keep, Bytes manifest,
                   Attempt* attempt) REQUIRES(mutex_);
  Allocator allocator_of(const std::vector<Version>& kept) const;
  void use_manifest(const Slot& slot, Allocator* allocator) const;

  std::shared_ptr<Media> media_;
  std::unique_ptr<Catalog> catalog_;
  StoreLock lock_;
  Header header_ = {};
  Token token_ = {};  // of a writer whose store has a path
  bool read_only_ = false;
  mutable Mutex mutex_;
  std::vector<Version> versions_ GUARDED_BY(mutex_);  // newest first
  Status failed_ GUARDED_BY(mutex_);  // kLost, once the media, a drain or the lock has said so
  bool in_doubt_ GUARDED_BY(mutex_) = false;  // a change of the slots has failed, or is under way
  std::vector<Version> lent_
      GUARDED_BY(mutex_);  // located by a reader: its private pages there are of these
  std::optional<uint32_t> refused_ GUARDED_BY(mutex_);  // the slot of a rebase that failed
  std::optional<uint32_t> begun_
      GUARDED_BY(mutex_);  // the slot of the last attempt, until it is committed
};

}  // namespace lightckpt
