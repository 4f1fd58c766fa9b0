// Catalog: where a store keeps its slots, and how manifests are found. A slot that is written here
// is a commit. Two kinds, named in the store's header:
//
//   kLines     a slot is one line of the media, manifests lie on the media among the areas
//   kPmemobj   slots and manifests are objects of a libpmemobj pool beside the store (pmemobj/)
//
// Threads: one at a time; the store's mutex sees to it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "format.h"
#include "media.h"
#include "status.h"

namespace lightckpt {

enum class CatalogKind : uint32_t { kLines = 0, kPmemobj = 1 };

class Catalog {
 public:
  virtual ~Catalog() = default;

  // A slot's bytes as they stand, whether they are one or not.
  virtual Slot line(uint32_t index) const = 0;
  // Both are durable when they return. After a crash in a publish the slot is the old one, the new
  // one, or none; in a retire, each is there or not. `in_use` is the offset of a manifest that
  // stays although no slot may name it: the attempt's.
  virtual Status publish(uint32_t index, const Slot& slot) = 0;
  virtual Status retire(const std::vector<uint32_t>& indexes, uint64_t in_use) = 0;
  // Makes durable what a process that was killed has left, before anything builds on it.
  virtual Status secure() = 0;
  // Makes the slots these, durably, after a drain or a page of the media failed: what became of
  // changes before that is unknown, where it depends on the media.
  virtual Status rewrite(const std::vector<Slot>& slots) = 0;

  // The bytes that the slot names, unchecked; they stay until the slot is retired.
  virtual Status manifest(const Slot& slot, Bytes* bytes) const = 0;
  // Are manifests kept here, and take no room on the media? Then `put` keeps one, durably, and
  // fills in its offset; kNoSpace leaves all as it was.
  virtual bool keeps_manifests() const = 0;
  virtual Status put(Bytes manifest, Slot* slot) = 0;
};

class LineCatalog final : public Catalog {
 public:
  LineCatalog(Media* media, uint32_t slot_count) : media_(*media), slot_count_(slot_count) {}

  Slot line(uint32_t index) const override;
  Status publish(uint32_t index, const Slot& slot) override;
  Status retire(const std::vector<uint32_t>& indexes, uint64_t in_use) override;
  Status secure() override;
  Status rewrite(const std::vector<Slot>& slots) override;
  Status manifest(const Slot& slot, Bytes* bytes) const override;
  bool keeps_manifests() const override { return false; }
  Status put(Bytes manifest, Slot* slot) override;

 private:
  void write(uint32_t index, const Slot& slot);

  Media& media_;
  uint32_t slot_count_;
};

// By the kind that a store's header names, which alone decides; `store` is the store's path, empty
// where it has none. For a new store: makes what has to lie beside it.
Status create_catalog(const std::string& store, const Header& header);
Status open_catalog(const std::string& store, const Header& header, Media* media,
                    std::unique_ptr<Catalog>* catalog);

}  // namespace lightckpt
