// The commit protocol. See store.h for what must always hold.
#include "store.h"

#include <algorithm>

#include "crc32c.h"

namespace lightckpt {

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

std::vector<Version> Store::versions() {
  const MutexLock lock(mutex_);
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
    const MutexLock lock(mutex_);
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

Status Store::write_slot(uint32_t index, const Slot& slot) {
  in_doubt_ = true;
  RETURN_IF_ERROR(keep_lost(catalog_->publish(index, slot)));
  // A slot's page that was lost just now took the line in, and will not give it back.
  RETURN_IF_ERROR(keep_lost(media_->check()));
  in_doubt_ = false;
  return {};
}

// Invariant 3: this is durable before anything is written where these versions lie.
Status Store::retire(const std::vector<uint32_t>& indexes, uint64_t manifest_in_use) {
  if (indexes.empty()) return {};
  in_doubt_ = true;
  RETURN_IF_ERROR(keep_lost(catalog_->retire(indexes, manifest_in_use)));
  RETURN_IF_ERROR(keep_lost(media_->check()));
  in_doubt_ = false;
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

Status Store::commit(const Attempt& attempt, RecordFront&& record, Bytes host) {
  const MutexLock lock(mutex_);
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
  // Nobody has taken the store over meanwhile, and not seen this slot.
  RETURN_IF_ERROR(check_hold());

  Version version;
  version.slot = slot;
  version.index = attempt.index;
  version.layout = attempt.layout;
  Bytes manifest;
  if (Status status = catalog_->manifest(slot, &manifest); !status.ok()) {
    in_doubt_ = true;
    return status;
  }
  version.blob = manifest.subspan(sizeof(ManifestHead) +
                                  attempt.layout->extent_bytes.size() * sizeof(uint64_t));
  versions_.insert(versions_.begin(), std::move(version));
  begun_.reset();
  return {};
}

Status Store::rebase(uint64_t number) {
  const MutexLock lock(mutex_);
  RETURN_IF_ERROR(check_hold());
  if (read_only_) return {Code::kAccess, "the store is open for reading only"};
  RETURN_IF_ERROR(repair());
  RETURN_IF_ERROR(give_up(&refused_));
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
  std::vector<std::pair<uint32_t, uint32_t>> unpinned;  // of each slot, how often
  std::vector<uint32_t> retired;
  for (auto version = versions_.begin(); version <= chosen; ++version) {
    unpinned.emplace_back(version->index, lock_.unpin_all(version->index));
    if (lock_.try_seal(version->index)) retired.push_back(version->index);
  }
  Version renewed = *chosen;
  renewed.index = *index;
  renewed.slot.generation = versions_.front().slot.generation + 1;
  renewed.slot = encode_slot(renewed.slot);
  // This line alone makes it the latest; until the next drain the newer ones still stand behind it.
  const Status written = write_slot(*index, renewed.slot);
  Status status = written;
  if (written.ok()) {
    unpinned = {{*index, unpinned.back().second}};
    versions_.push_back(std::move(renewed));
    status = retire(retired);
  } else {
    refused_ = *index;
  }
  for (uint32_t sealed : retired) lock_.unseal(sealed);
  sort_versions();
  for (const auto& [slot, times] : unpinned) {
    for (uint32_t i = 0; i < times; ++i) RETURN_IF_ERROR(lock_.pin(slot));
  }
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
  const MutexLock lock(mutex_);
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
