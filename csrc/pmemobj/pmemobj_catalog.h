// PmemobjCatalog: slots and manifests in a libpmemobj pool, which lies beside the store.
//
//   root      := PoolHead, padding to 64 B, Slot per slot of the store
//   manifest  := pieces, each an object of at most 64 KiB: PieceHead, bytes
//
// Each change is one transaction. A manifest is put before any slot names it, so a process that is
// killed in between leaves pieces that nothing names: `secure` frees them, as the next `put` does
// those of attempts that were dropped, and `retire` those of manifests that nothing names now.
// Extents never lie in a pool: its heap aligns objects to 16 bytes after a header, and cannot hold
// large ones (docs/ARCHITECTURE.md).
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "catalog.h"
#include "pmemobj/pmemobj.h"

namespace lightckpt {

inline constexpr uint64_t kPoolBytes = 64 << 20;

class PmemobjCatalog final : public Catalog {
 public:
  // Where the catalog of a store lies.
  static std::string path_of(const std::string& store) { return store + ".catalog"; }
  // Makes a new pool, in place of one that a store of this name may have left.
  static Status create(const std::string& path, const Header& header);
  // kFormat: it is not the catalog of the store with this header.
  static Status open(const std::string& path, const Header& header,
                     std::unique_ptr<Catalog>* catalog);

  Slot line(uint32_t index) const override;
  Status publish(uint32_t index, const Slot& slot) override;
  Status retire(const std::vector<uint32_t>& indexes, uint64_t in_use) override;
  Status secure() override;
  // Nothing is unknown here: a transaction is there or not.
  Status rewrite(const std::vector<Slot>&) override { return {}; }
  Status manifest(const Slot& slot, Bytes* bytes) const override;
  bool keeps_manifests() const override { return true; }
  Status put(Bytes manifest, Slot* slot) override;

 private:
  struct Manifest {
    std::vector<std::byte> bytes;  // in one piece, for those who look at it
    std::vector<uint64_t> pieces;
  };
  using Transaction = PmemobjPool::Transaction;

  PmemobjCatalog(std::unique_ptr<PmemobjPool> pool, uint32_t slot_count, uint64_t root);
  uint64_t place_of(uint32_t index) const;
  Status write(Transaction* transaction, uint32_t index, const Slot& slot);
  Status read(const Slot& slot, Manifest* manifest) const;
  std::set<uint64_t> named() const;

  std::unique_ptr<PmemobjPool> pool_;
  uint32_t slot_count_;
  uint64_t root_;
  std::map<uint64_t, uint64_t> pieces_;             // their usable bytes, by offset
  mutable std::map<uint64_t, Manifest> manifests_;  // those looked at or put, by first piece
};

}  // namespace lightckpt
