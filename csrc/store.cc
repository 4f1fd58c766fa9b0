// The commit protocol. See store.h for what must always hold.
#include "store.h"

#include <algorithm>

#include "crc32c.h"

namespace lightckpt {
namespace {

// That a begin finds: one for its version, and one to go back to an older one.
constexpr size_t kSlotsFree = 2;

}  // namespace

void Store::sort_versions() {
  std::ranges::sort(versions_, [](const Version& a, const Version& b) {
    return std::tie(a.slot.generation, a.slot.version) >
           std::tie(b.slot.generation, b.slot.version);
  });
}

uint64_t Store::newest() const {
  uint64_t newest = 0;
  for (const Version& version : versions_) newest = std::max(newest, version.slot.version);
  return newest;
}

uint64_t Store::free_bytes() const {
  std::lock_guard lock(mutex_);
  return allocator_of(versions_).free_bytes();
}

std::vector<Version> Store::versions() {
  std::lock_guard lock(mutex_);
  // A reader follows the writer; a failed look leaves what was known.
  if (read_only_) (void)scan().ok();
  std::vector<Version> found;
  for (const Version& version : versions_) {
    // After a rebase a version may have two slots for a while; the newer generation speaks for it,
    // unless only the older one can be loaded.
    const auto known = std::ranges::find_if(
        found, [&](const Version& v) { return v.slot.version == version.slot.version; });
    if (known != found.end() && (known->damage.ok() || !version.damage.ok())) continue;
    if (known != found.end()) found.erase(known);
    found.push_back(version);
  }
  return found;
}

Status Store::find(uint64_t number, Version* found) {
  if (read_only_) {
    // As long as its slot says the same, what is known of a version holds: no need to scan anew.
    std::lock_guard lock(mutex_);
    for (const Version& version : versions_) {
      Slot slot;
      if (version.slot.version == number && version.damage.ok() &&
          read_slot(version.index, &slot) && slot.crc == version.slot.crc) {
        *found = version;
        return {};
      }
    }
  }
  for (Version& version : versions()) {
    if (version.slot.version != number) continue;
    *found = std::move(version);
    return found->damage;
  }
  return {Code::kNotFound, "the store holds no version " + std::to_string(number)};
}

Allocator Store::allocator_of(const std::vector<Version>& kept) const {
  Allocator allocator(heap_offset(header_.slot_count), media_->size());
  for (const Version& version : kept) {
    if (!version.damage.ok()) continue;
    if (!catalog_->keeps_manifests()) {
      allocator.use(version.slot.manifest_offset, version.slot.manifest_bytes);
    }
    allocator.use(version.slot.record_offset, version.layout->area_bytes);
  }
  return allocator;
}

std::optional<uint32_t> Store::free_slot() const {
  for (uint32_t index = 0; index < header_.slot_count; ++index) {
    const bool taken =
        std::ranges::any_of(versions_, [&](const Version& v) { return v.index == index; });
    if (!taken && index != begun_) return index;
  }
  return std::nullopt;
}

Status Store::write_slot(uint32_t index, const Slot& slot) {
  unsettled_ = true;
  RETURN_IF_ERROR(keep_lost(catalog_->publish(index, slot)));
  // A slot's page that was lost just now took the line in, and will not give it back.
  RETURN_IF_ERROR(keep_lost(media_->check()));
  unsettled_ = false;
  return {};
}

// Invariant 3: this is durable before anything is written where these versions lie.
Status Store::retire(const std::vector<uint32_t>& indexes, uint64_t manifest_in_use) {
  if (indexes.empty()) return {};
  unsettled_ = true;
  RETURN_IF_ERROR(keep_lost(catalog_->retire(indexes, manifest_in_use)));
  RETURN_IF_ERROR(keep_lost(media_->check()));
  unsettled_ = false;
  std::erase_if(versions_, [&](const Version& version) {
    return std::ranges::find(indexes, version.index) != indexes.end();
  });
  return {};
}

// A crash may have torn a line that was being written or retired here: with words of the next one
// it could become whole again, and name bytes that are overwritten. So it goes before that is
// written.
Status Store::clear(uint32_t index, uint64_t manifest_in_use) {
  const Slot none = {}, line = catalog_->line(index);
  if (std::memcmp(&line, &none, sizeof(none)) == 0) return {};
  return retire({index}, manifest_in_use);
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

// Finds room for the attempt and, the first time a layout is seen, for the keep further areas that
// will take turns with it: a store that is too small says so now, not at the second version.
Status Store::place(Attempt* attempt, const std::vector<Version>& kept, uint32_t keep,
                    bool place_manifest) {
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
  if (place_manifest)
    attempt->slot.manifest_offset = take(attempt->slot.manifest_bytes, kPageBytes);
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

Status Store::begin(uint64_t step, uint32_t keep, std::vector<uint64_t> extents, Bytes blob,
                    uint64_t host_bytes, Attempt* attempt) {
  std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(check_hold());
  if (read_only_) return {Code::kAccess, "the store is open for reading only"};
  RETURN_IF_ERROR(repair());
  if (keep < 1 || keep > header_.slot_count - 2) {
    return {Code::kInvalid, "keep is " + std::to_string(keep) + "; a store of " +
                                std::to_string(header_.slot_count) + " slots can keep 1 to " +
                                std::to_string(header_.slot_count - 2)};
  }
  if (newest() == kVersionMax) {
    return {Code::kFormat, "the store holds version " + std::to_string(kVersionMax) +
                               ": there is no number for a newer one"};
  }
  // Whatever was begun before is given up. Its slot may have been written all the same, by a commit
  // that ended before it knew.
  if (begun_) RETURN_IF_ERROR(clear(*begun_));
  begun_.reset();
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
  std::vector<std::byte> manifest;
  const auto known = std::ranges::find_if(versions_, [&](const Version& v) {
    return v.damage.ok() && v.layout->record_capacity >= record_needed &&
           v.layout->extent_bytes == extents && std::ranges::equal(v.blob, blob);
  });
  if (known != versions_.end()) {
    attempt->layout = known->layout;
    attempt->slot.manifest_offset = known->slot.manifest_offset;
    attempt->slot.manifest_bytes = known->slot.manifest_bytes;
    attempt->slot.manifest_crc = known->slot.manifest_crc;
  } else {
    // Half as much again, so that a growing host state seldom needs a new layout.
    const uint64_t capacity = round_up(record_needed + record_needed / 2, kPageBytes);
    attempt->layout = std::make_shared<Layout>(Layout::of(std::move(extents), capacity));
    manifest = encode_manifest(header_.store_id, *attempt->layout, blob);
    attempt->slot.manifest_bytes = static_cast<uint32_t>(manifest.size());
    attempt->slot.manifest_crc = crc32c(0, manifest.data(), manifest.size());
  }

  std::vector<uint32_t> retired;
  std::vector<Version> kept = survivors(keep, &retired);
  if (kept.size() + kSlotsFree > header_.slot_count) {
    for (uint32_t index : retired) lock_.unseal(index);
    return too_many_pinned(kept, keep);
  }
  // The manifest of a version that is about to go may be the one found above: it stays in use.
  const bool place_manifest = !manifest.empty() && !catalog_->keeps_manifests();
  if (manifest.empty() && !catalog_->keeps_manifests() &&
      std::ranges::find(retired, known->index) != retired.end()) {
    kept.push_back(*known);
    kept.back().layout = std::make_shared<Layout>();
    kept.back().slot.record_offset = kept.back().slot.manifest_offset;
  }
  Status status = keep_lost(place(attempt, kept, keep, place_manifest));
  if (status.ok() && !manifest.empty() && catalog_->keeps_manifests()) {
    status = catalog_->put(manifest, &attempt->slot);
  }
  if (status.ok()) status = retire(retired, attempt->slot.manifest_offset);
  for (uint32_t index : retired) lock_.unseal(index);
  RETURN_IF_ERROR(status);

  const auto slot = free_slot();
  CHECK(slot.has_value());
  RETURN_IF_ERROR(clear(*slot, attempt->slot.manifest_offset));
  begun_ = attempt->index = *slot;
  versions_.reserve(versions_.size() + 1);  // where commit would find no memory, it has published
  media_->populate(attempt->slot.record_offset, attempt->layout->area_bytes);
  if (place_manifest) {
    // Durable with the data, before the slot that refers to it. The fence is this thread's own:
    // commit may run on another, whose drain does not wait for these stores.
    media_->nt_copy(attempt->slot.manifest_offset, manifest);
    media_->fence();
  }
  return {};
}

Status Store::commit(const Attempt& attempt, RecordFront&& record, Bytes host) {
  std::lock_guard lock(mutex_);
  if (!failed_.ok()) return failed_;
  CHECK(record.chunk_count() == attempt.layout->chunk_count);
  const Bytes front = record.seal({0, 0, header_.store_id, attempt.slot.step, host.size()});
  const uint64_t record_bytes = front.size() + host.size();
  if (record_bytes > attempt.layout->record_capacity) {
    return {Code::kInvalid, "the record has " + std::to_string(record_bytes) +
                                " bytes; the area was laid out for " +
                                std::to_string(attempt.layout->record_capacity)};
  }
  Slot slot = attempt.slot;
  slot.record_bytes = static_cast<uint32_t>(record_bytes);
  slot.record_crc = crc32c(crc32c(0, front.data(), front.size()), host.data(), host.size());
  media_->nt_copy(slot.record_offset, front);
  media_->nt_copy(slot.record_offset + front.size(), host);
  RETURN_IF_ERROR(keep_lost(media_->check()));
  // Invariant 1. Without this drain the slot below could become durable before what it reaches.
  RETURN_IF_ERROR(keep_lost(media_->drain()));
  // A page that was lost while it was written shows only now.
  RETURN_IF_ERROR(keep_lost(media_->check()));

  RETURN_IF_ERROR(check_hold());
  for (const Version& version : versions_) {
    slot.generation = std::max(slot.generation, version.slot.generation);
  }
  slot.version = newest() + 1;
  slot = encode_slot(slot);
  RETURN_IF_ERROR(write_slot(attempt.index, slot));

  Version version;
  version.slot = slot;
  version.index = attempt.index;
  version.layout = attempt.layout;
  Bytes manifest;
  if (Status status = catalog_->manifest(slot, &manifest); !status.ok()) {
    unsettled_ = true;
    return status;
  }
  version.blob = manifest.subspan(sizeof(ManifestHead) +
                                  attempt.layout->extent_bytes.size() * sizeof(uint64_t));
  versions_.insert(versions_.begin(), std::move(version));
  begun_.reset();
  return {};
}

Status Store::rebase(uint64_t number) {
  std::lock_guard lock(mutex_);
  RETURN_IF_ERROR(check_hold());
  if (read_only_) return {Code::kAccess, "the store is open for reading only"};
  RETURN_IF_ERROR(repair());
  const auto chosen = std::ranges::find_if(
      versions_, [&](const Version& v) { return v.slot.version == number && v.damage.ok(); });
  if (chosen == versions_.end()) {
    return {Code::kNotFound, "the store holds no version " + std::to_string(number)};
  }
  if (chosen == versions_.begin()) return {};
  if (versions_.front().slot.generation == kGenerationMax) {
    return {Code::kFormat, "the store is in generation " + std::to_string(kGenerationMax) +
                               ": there is no number for a newer one"};
  }
  const auto index = free_slot();
  if (!index) {
    return {Code::kBusy, "no free slot to make version " + std::to_string(number) + " latest"};
  }
  RETURN_IF_ERROR(clear(*index));
  // The newer ones go, whatever this handle has pinned. One that somebody else is reading stays
  // until a later begin: its generation is old, so it is never the latest again. The chosen one
  // takes this handle's pins along.
  const uint32_t pins = lock_.unpin_all(chosen->index);
  std::vector<uint32_t> retired;
  for (auto version = versions_.begin(); version <= chosen; ++version) {
    lock_.unpin_all(version->index);
    if (lock_.try_seal(version->index)) retired.push_back(version->index);
  }
  Version renewed = *chosen;
  renewed.index = *index;
  renewed.slot.generation = versions_.front().slot.generation + 1;
  renewed.slot = encode_slot(renewed.slot);
  // This line alone makes it the latest; until the next drain the newer ones still stand behind it.
  Status status = write_slot(*index, renewed.slot);
  if (status.ok()) {
    versions_.push_back(std::move(renewed));
    status = retire(retired);
  }
  for (uint32_t sealed : retired) lock_.unseal(sealed);
  sort_versions();
  for (uint32_t i = 0; i < pins; ++i) RETURN_IF_ERROR(lock_.pin(*index));
  return status;
}

Status Store::pin(uint64_t number, bool pinned) {
  Version version;
  RETURN_IF_ERROR(find(number, &version));
  if (!pinned) {
    lock_.unpin(version.index);
    return {};
  }
  const bool is_first = !has_pin_on(version);
  RETURN_IF_ERROR(lock_.pin(version.index));
  // The writer may have retired it between the look and the lock.
  std::lock_guard lock(mutex_);
  Slot again = {};
  if (read_slot(version.index, &again) && again.version == version.slot.version &&
      again.generation == version.slot.generation) {
    if (is_first) forget_private(version);
    return {};
  }
  lock_.unpin(version.index);
  return {Code::kNotFound, "version " + std::to_string(number) + " was retired just now"};
}

}  // namespace lightckpt
