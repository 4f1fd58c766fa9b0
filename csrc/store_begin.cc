// How a version begins: its layout and manifest, room for them, and a slot. See store.h.
#include <algorithm>

#include "crc32c.h"
#include "store.h"

namespace lightckpt {
namespace {

// That a begin finds: one for its version, and one to go back to an older one.
constexpr size_t kSlotsFree = 2;

}  // namespace

Status Store::begin(uint64_t step, uint32_t keep, std::vector<uint64_t> extents, Bytes blob,
                    uint64_t host_bytes, Attempt* attempt) {
  const MutexLock lock(mutex_);
  RETURN_IF_ERROR(may_begin(keep));
  std::vector<std::byte> manifest;
  RETURN_IF_ERROR(lay_out(step, std::move(extents), blob, host_bytes, attempt, &manifest));
  RETURN_IF_ERROR(make_room(keep, manifest, attempt));

  const auto slot = free_slot();
  CHECK(slot.has_value());
  RETURN_IF_ERROR(clear(*slot, attempt->slot.manifest_offset));
  begun_ = attempt->index = *slot;
  versions_.reserve(versions_.size() + 1);  // where commit would find no memory, it has published
  media_->populate(attempt->slot.record_offset, attempt->layout->area_bytes);
  if (!manifest.empty() && !catalog_->keeps_manifests()) {
    // Durable with the data, before the slot that refers to it. The fence is this thread's own:
    // commit may run on another, whose drain does not wait for these stores.
    media_->nt_copy(attempt->slot.manifest_offset, manifest);
    media_->fence();
  }
  return {};
}

// Is this still a store that takes a version more? Gives up the attempt before.
Status Store::may_begin(uint32_t keep) {
  RETURN_IF_ERROR(check_hold());
  if (read_only_) return {Code::kAccess, "the store is open for reading only"};
  RETURN_IF_ERROR(repair());
  if (keep < 1 || keep > header_.slot_count - kSlotsFree) {
    return {Code::kInvalid, "keep is " + std::to_string(keep) + "; a store of " +
                                std::to_string(header_.slot_count) + " slots can keep 1 to " +
                                std::to_string(header_.slot_count - kSlotsFree)};
  }
  if (newest() == kVersionMax) {
    return {Code::kFormat, "the store holds version " + std::to_string(kVersionMax) +
                               ": there is no number for a newer one"};
  }
  RETURN_IF_ERROR(give_up(&refused_));
  return give_up(&begun_);
}

// The slot of an attempt that became no version, or of a rebase that failed. It may have been
// written all the same, by a call that ended before it knew: what was refused must not happen
// later. Where a reader has found it already it stays, a version that came late: repair has made it
// durable.
Status Store::give_up(std::optional<uint32_t>* slot) {
  if (*slot && lock_.try_seal(**slot)) {
    const Status status = clear(**slot);
    lock_.unseal(**slot);
    RETURN_IF_ERROR(status);
  }
  slot->reset();
  return {};
}

// Gives the attempt its layout, and its manifest: that of a version of the same structure, or a new
// one, whose bytes are then `manifest`.
Status Store::lay_out(uint64_t step, std::vector<uint64_t> extents, Bytes blob, uint64_t host_bytes,
                      Attempt* attempt, std::vector<std::byte>* manifest) const {
  *attempt = {};
  attempt->slot.store_id = header_.store_id;
  attempt->slot.step = step;
  uint64_t chunks = 0;
  for (uint64_t bytes : extents) {
    if (bytes > kExtentBytesMax) {
      return {Code::kNoSpace, "an extent has " + std::to_string(bytes) + " bytes; at most " +
                                  std::to_string(kExtentBytesMax) + " are possible"};
    }
    chunks += (bytes + kChunkBytes - 1) / kChunkBytes;
  }
  const uint64_t manifest_needed =
      sizeof(ManifestHead) + extents.size() * sizeof(uint64_t) + blob.size();
  const uint64_t record_needed = record_table_end(chunks) + host_bytes;
  if (host_bytes > UINT32_MAX || record_needed > UINT32_MAX / 2 ||
      manifest_needed > UINT32_MAX / 2) {
    return {Code::kNoSpace, "the record has " + std::to_string(record_needed) +
                                " bytes and the manifest " + std::to_string(manifest_needed) +
                                "; each may have 2 GiB"};
  }
  const auto known = std::ranges::find_if(versions_, [&](const Version& v) {
    return v.damage.ok() && v.layout->record_capacity >= record_needed &&
           v.layout->extent_bytes == extents && std::ranges::equal(v.blob, blob);
  });
  if (known != versions_.end()) {
    attempt->layout = known->layout;
    attempt->slot.manifest_offset = known->slot.manifest_offset;
    attempt->slot.manifest_bytes = known->slot.manifest_bytes;
    attempt->slot.manifest_crc = known->slot.manifest_crc;
    return {};
  }
  // Half as much again, so that a growing host state seldom needs a new layout.
  const uint64_t capacity = round_up(record_needed + record_needed / 2, kPageBytes);
  attempt->layout = std::make_shared<Layout>(Layout::of(std::move(extents), capacity));
  *manifest = encode_manifest(header_.store_id, *attempt->layout, blob);
  attempt->slot.manifest_bytes = static_cast<uint32_t>(manifest->size());
  attempt->slot.manifest_crc = crc32c(0, manifest->data(), manifest->size());
  return {};
}

// Finds room for the attempt, and retires what is not to stay: last, so that a store that is too
// small has given up nothing when it says so.
Status Store::make_room(uint32_t keep, Bytes manifest, Attempt* attempt) {
  std::vector<uint32_t> retired;
  const std::vector<Version> kept = survivors(keep, &retired);
  Status status;
  if (kept.size() + kSlotsFree > header_.slot_count) status = too_many_pinned(kept, keep);
  if (status.ok()) status = keep_lost(take_room(kept, keep, manifest, attempt));
  if (status.ok() && !manifest.empty() && catalog_->keeps_manifests()) {
    status = catalog_->put(manifest, &attempt->slot);
  }
  if (status.ok()) status = retire(retired, attempt->slot.manifest_offset);
  for (uint32_t index : retired) lock_.unseal(index);
  return status;
}

// Which versions stay when a new one begins, and which slots are given up for it. The slots given
// up are sealed against new readers until begin has retired them.
std::vector<Version> Store::survivors(uint32_t keep, std::vector<uint32_t>* retired) {
  std::vector<Version> kept;
  uint32_t count = 0;   // of those kept for their own sake, not for a reader's
  uint64_t oldest = 0;  // the last of them
  for (const Version& version : versions_) {
    // Behind a rebase stand the versions that it gave up, and the old slot of the one it chose.
    const bool given_up = count > 0 && version.slot.version >= oldest;
    const bool wanted = version.damage.ok() && !given_up && count < keep;
    if (wanted) {
      ++count;
      oldest = version.slot.version;
    }
    if (wanted || !lock_.try_seal(version.index)) {
      kept.push_back(version);
    } else {
      retired->push_back(version.index);
    }
  }
  return kept;
}

// Readers that come and go leave slots free again: a later begin may find some.
Status Store::too_many_pinned(const std::vector<Version>& kept, uint32_t keep) const {
  const auto here = std::ranges::count_if(
      kept, [&](const Version& version) { return lock_.pinned_here(version.index); });
  const auto read = std::ranges::count_if(
      kept, [&](const Version& version) { return lock_.pinned_elsewhere(version.index); });
  return {Code::kBusy, "of " + std::to_string(header_.slot_count) + " slots " +
                           std::to_string(kept.size()) + " are taken: readers hold " +
                           std::to_string(read) + " versions, this process has pinned " +
                           std::to_string(here) + ", and the newest " + std::to_string(keep) +
                           " are kept; " + std::to_string(kSlotsFree) + " must be free"};
}

// Takes an area for the attempt and, the first time a layout is seen, the keep further areas that
// will take turns with it: a store that is too small says so now, not at the second version.
Status Store::take_room(const std::vector<Version>& kept, uint32_t keep, Bytes manifest,
                        Attempt* attempt) {
  Allocator allocator = allocator_of(kept);
  uint64_t end = media_->size();
  const auto take = [&](uint64_t bytes, uint64_t align) {
    if (const auto offset = allocator.take(bytes, align)) return *offset;
    end = allocator.end_needed(bytes, align);
    allocator.extend(end);
    const auto offset = allocator.take(bytes, align);
    CHECK(offset.has_value());
    return *offset;
  };
  if (manifest.empty()) {
    use_manifest(attempt->slot, &allocator);  // the version that it was made for may be about to go
  } else if (!catalog_->keeps_manifests()) {
    attempt->slot.manifest_offset = take(manifest.size(), kPageBytes);
  }
  const uint64_t bytes = attempt->layout->area_bytes;
  attempt->slot.record_offset = take(bytes, area_align(bytes));
  const auto same =
      std::ranges::count_if(kept, [&](const Version& v) { return v.layout->area_bytes == bytes; });
  for (auto areas = static_cast<uint32_t>(same) + 1; areas < keep + 1; ++areas) {
    take(bytes, area_align(bytes));
  }
  // Whole pages, even if a manifest comes last: growth continues where the mapping ends.
  return media_->grow(round_up(end, kPageBytes));
}

Allocator Store::allocator_of(const std::vector<Version>& kept) const {
  Allocator allocator(heap_offset(header_.slot_count), media_->size());
  for (const Version& version : kept) {
    if (!version.damage.ok()) continue;
    use_manifest(version.slot, &allocator);
    allocator.use(version.slot.record_offset, version.layout->area_bytes);
  }
  return allocator;
}

void Store::use_manifest(const Slot& slot, Allocator* allocator) const {
  if (!catalog_->keeps_manifests()) allocator->use(slot.manifest_offset, slot.manifest_bytes);
}

std::optional<uint32_t> Store::free_slot() const {
  for (uint32_t index = 0; index < header_.slot_count; ++index) {
    const bool taken =
        std::ranges::any_of(versions_, [&](const Version& v) { return v.index == index; });
    if (!taken && index != begun_ && index != refused_) return index;
  }
  return std::nullopt;
}

uint64_t Store::free_bytes() const {
  const MutexLock lock(mutex_);
  return allocator_of(versions_).free_bytes();
}

}  // namespace lightckpt
