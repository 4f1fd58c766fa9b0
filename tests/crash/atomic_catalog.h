// AtomicCatalog: what a store sees of a PmemobjCatalog, in memory that a test owns. Each change is
// one event, which a crash leaves whole or not at all: that libpmemobj's transactions are so is
// taken for granted, and so is nothing else. This one orders no write of the media, where the
// library's happens to fence for its thread as well.
//
//   slot page := Slot, u32 bytes of the manifest that lies here or 0, the manifest
//
// A page's manifest may be any slot's. As there, a put comes before a publish, so there may be one
// that no slot names: secure frees it, the next put does first, and a retire unless it is in use.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "catalog.h"

namespace lightckpt {

class AtomicCatalog final : public Catalog {
 public:
  // Told of each change before it takes effect: its name, and all slot pages as they will be.
  using OnChange = std::function<void(const std::string& name, uint64_t offset, Bytes pages)>;

  AtomicCatalog(std::byte* memory, uint32_t slot_count, OnChange on_change)
      : memory_(memory), slot_count_(slot_count), on_change_(std::move(on_change)) {}
  // How many manifests no slot names.
  static uint64_t orphans(const std::byte* memory, uint32_t slot_count);

  Slot line(uint32_t index) const override;
  Status publish(uint32_t index, const Slot& slot) override;
  Status retire(const std::vector<uint32_t>& indexes, uint64_t in_use) override;
  Status secure() override;
  Status rewrite(const std::vector<Slot>&) override { return {}; }
  Status manifest(const Slot& slot, Bytes* bytes) const override;
  bool keeps_manifests() const override { return true; }
  Status put(Bytes manifest, Slot* slot) override;

 private:
  std::vector<std::byte> pages() const;
  void change(const std::string& name, const std::vector<std::byte>& after);

  std::byte* memory_;
  uint32_t slot_count_;
  OnChange on_change_;
};

// For Store::open, which makes a LineCatalog itself where there is none.
std::unique_ptr<Catalog> catalog_of(CatalogKind kind, std::byte* memory, uint32_t slot_count,
                                    AtomicCatalog::OnChange on_change);

}  // namespace lightckpt
