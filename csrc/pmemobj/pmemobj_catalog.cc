// Slots and manifests as objects. See pmemobj_catalog.h.
#include "pmemobj/pmemobj_catalog.h"

#include <unistd.h>

#include <algorithm>

namespace lightckpt {
namespace {

constexpr char kLayout[] = "lightckpt-catalog";
constexpr uint64_t kPieceType = 1;
constexpr uint64_t kPieceBytes = 64 << 10;

struct PoolHead {
  uint64_t format;
  uint64_t store_id;
  uint64_t slot_count;
};

struct PieceHead {
  uint64_t next;  // offset of the piece behind it; 0: none
  uint64_t bytes;
};

constexpr uint64_t kPieceRoom = kPieceBytes - sizeof(PieceHead);
constexpr uint64_t kSlotsAt = 64;

uint64_t root_bytes(uint32_t slot_count) { return kSlotsAt + slot_count * sizeof(Slot); }

Status out_of_place(const std::string& what) {
  return {Code::kFormat, "its manifest in the catalog " + what};
}

}  // namespace

PmemobjCatalog::PmemobjCatalog(std::unique_ptr<PmemobjPool> pool, uint32_t slot_count,
                               uint64_t root)
    : pool_(std::move(pool)), slot_count_(slot_count), root_(root) {
  pool_->each([&](uint64_t offset, uint64_t bytes, uint64_t type) {
    if (type == kPieceType && bytes > sizeof(PieceHead)) pieces_.emplace(offset, bytes);
  });
}

Status PmemobjCatalog::create(const std::string& path, const Header& header) {
  RETURN_IF_ERROR(PmemobjPool::library());
  unlink(path.c_str());
  std::unique_ptr<PmemobjPool> pool;
  Status status = PmemobjPool::create(path, kLayout, kPoolBytes, &pool);
  uint64_t root = 0;
  if (status.ok()) status = pool->root(root_bytes(header.slot_count), &root);
  if (status.ok()) {
    status = pool->transact([&](PmemobjPool::Transaction* transaction) -> Status {
      RETURN_IF_ERROR(transaction->add(root, sizeof(PoolHead)));
      const PoolHead head = {kFormat, header.store_id, header.slot_count};
      std::memcpy(pool->at(root), &head, sizeof(head));
      return {};
    });
  }
  if (!status.ok()) unlink(path.c_str());
  return status;
}

Status PmemobjCatalog::open(const std::string& path, const Header& header,
                            std::unique_ptr<Catalog>* catalog) {
  std::unique_ptr<PmemobjPool> pool;
  RETURN_IF_ERROR(PmemobjPool::open(path, kLayout, &pool));
  uint64_t root = 0;
  RETURN_IF_ERROR(pool->root(root_bytes(header.slot_count), &root));
  PoolHead head;
  std::memcpy(&head, pool->at(root), sizeof(head));
  if (head.format != kFormat || head.store_id != header.store_id ||
      head.slot_count != header.slot_count) {
    return {Code::kFormat, path + " is the catalog of another store"};
  }
  catalog->reset(new PmemobjCatalog(std::move(pool), header.slot_count, root));
  return {};
}

uint64_t PmemobjCatalog::place_of(uint32_t index) const {
  return root_ + kSlotsAt + index * sizeof(Slot);
}

Slot PmemobjCatalog::line(uint32_t index) const {
  Slot slot;
  std::memcpy(&slot, pool_->at(place_of(index)), sizeof(slot));
  return slot;
}

Status PmemobjCatalog::write(Transaction* transaction, uint32_t index, const Slot& slot) {
  RETURN_IF_ERROR(transaction->add(place_of(index), sizeof(slot)));
  std::memcpy(pool_->at(place_of(index)), &slot, sizeof(slot));
  return {};
}

Status PmemobjCatalog::publish(uint32_t index, const Slot& slot) {
  return pool_->transact([&](Transaction* transaction) { return write(transaction, index, slot); });
}

// The manifests that a slot names, by first piece.
std::set<uint64_t> PmemobjCatalog::named() const {
  std::set<uint64_t> offsets;
  for (uint32_t index = 0; index < slot_count_; ++index) {
    offsets.insert(line(index).manifest_offset);
  }
  return offsets;
}

Status PmemobjCatalog::retire(const std::vector<uint32_t>& indexes, uint64_t in_use) {
  std::vector<uint64_t> gone;
  Status status = pool_->transact([&](Transaction* transaction) -> Status {
    for (uint32_t index : indexes) RETURN_IF_ERROR(write(transaction, index, {}));
    const std::set<uint64_t> left = named();
    for (const auto& [first, manifest] : manifests_) {
      if (left.contains(first) || first == in_use) continue;
      for (uint64_t piece : manifest.pieces) RETURN_IF_ERROR(transaction->free(piece));
      gone.push_back(first);
    }
    return {};
  });
  if (!status.ok()) return status;
  for (uint64_t first : gone) {
    for (uint64_t piece : manifests_[first].pieces) pieces_.erase(piece);
    manifests_.erase(first);
  }
  return {};
}

Status PmemobjCatalog::secure() {
  std::set<uint64_t> used;
  for (uint32_t index = 0; index < slot_count_; ++index) {
    const Slot slot = line(index);
    Manifest manifest;
    // A slot that is damaged, or names what is, keeps what can be followed: for whoever looks.
    if (slot.manifest_offset != 0) (void)read(slot, &manifest).ok();
    used.insert(manifest.pieces.begin(), manifest.pieces.end());
  }
  const Status status = pool_->transact([&](Transaction* transaction) -> Status {
    for (const auto& [piece, bytes] : pieces_) {
      if (!used.contains(piece)) RETURN_IF_ERROR(transaction->free(piece));
    }
    return {};
  });
  if (!status.ok()) return status;
  std::erase_if(pieces_, [&](const auto& piece) { return !used.contains(piece.first); });
  return {};
}

// Follows the pieces; each offset is one of an object that is there, whatever the bytes say.
Status PmemobjCatalog::read(const Slot& slot, Manifest* manifest) const {
  if (slot.manifest_bytes > pool_->size()) return out_of_place("is larger than its pool");
  uint64_t at = slot.manifest_offset;
  while (manifest->bytes.size() < slot.manifest_bytes) {
    const auto piece = pieces_.find(at);
    if (piece == pieces_.end()) return out_of_place("has a piece that is not there");
    PieceHead head;
    std::memcpy(&head, pool_->at(at), sizeof(head));
    if (head.bytes == 0 || head.bytes > piece->second - sizeof(head) ||
        head.bytes > slot.manifest_bytes - manifest->bytes.size()) {
      return out_of_place("has a piece of " + std::to_string(head.bytes) + " bytes in " +
                          std::to_string(piece->second));
    }
    manifest->pieces.push_back(at);
    const std::byte* data = pool_->at(at) + sizeof(head);
    manifest->bytes.insert(manifest->bytes.end(), data, data + head.bytes);
    at = head.next;
  }
  return {};
}

Status PmemobjCatalog::manifest(const Slot& slot, Bytes* bytes) const {
  auto known = manifests_.find(slot.manifest_offset);
  if (known == manifests_.end()) {
    Manifest found;
    RETURN_IF_ERROR(read(slot, &found));
    known = manifests_.emplace(slot.manifest_offset, std::move(found)).first;
  }
  if (known->second.bytes.size() != slot.manifest_bytes) {
    return out_of_place("has " + std::to_string(known->second.bytes.size()) + " bytes, not " +
                        std::to_string(slot.manifest_bytes));
  }
  *bytes = known->second.bytes;
  return {};
}

Status PmemobjCatalog::put(Bytes manifest, Slot* slot) {
  CHECK(!manifest.empty());
  // Those of attempts that were dropped since the last retire: else they would fill the pool.
  RETURN_IF_ERROR(retire({}, 0));
  Manifest made;
  made.bytes.assign(manifest.begin(), manifest.end());
  std::map<uint64_t, uint64_t> sizes;
  const Status status = pool_->transact([&](Transaction* transaction) -> Status {
    for (uint64_t at = 0; at < manifest.size(); at += kPieceRoom) {
      const Bytes part = manifest.subspan(at, std::min(kPieceRoom, manifest.size() - at));
      uint64_t offset = 0;
      RETURN_IF_ERROR(transaction->alloc(sizeof(PieceHead) + part.size(), kPieceType, &offset));
      const PieceHead head = {0, part.size()};
      std::memcpy(pool_->at(offset), &head, sizeof(head));
      std::memcpy(pool_->at(offset) + sizeof(head), part.data(), part.size());
      // The one before is of this transaction too, so its change needs no log.
      if (!made.pieces.empty()) std::memcpy(pool_->at(made.pieces.back()), &offset, sizeof(offset));
      made.pieces.push_back(offset);
      sizes.emplace(offset, sizeof(PieceHead) + part.size());
    }
    return {};
  });
  if (!status.ok()) {
    return {status.code(), "the catalog has no room for a manifest of " +
                               std::to_string(manifest.size()) + " bytes: " + status.message()};
  }
  slot->manifest_offset = made.pieces.front();
  pieces_.merge(sizes);
  manifests_.insert_or_assign(slot->manifest_offset, std::move(made));
  return {};
}

}  // namespace lightckpt
