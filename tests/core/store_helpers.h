// States of a training run, made from their step, and what it takes to save and compare them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "crc32c.h"
#include "file_media.h"
#include "helpers.h"
#include "store.h"

namespace lightckpt {

// All bytes follow from the step, but the blob, which follows from the sizes: as a manifest, it is
// the same as long as the structure is.
struct State {
  uint64_t step = 0;
  std::vector<Buffer> extents;
  Buffer blob;
  Buffer host;

  static State of(uint64_t step, const std::vector<uint64_t>& sizes, uint64_t host_bytes = 100) {
    State state;
    state.step = step;
    uint64_t seed = step * 1000, structure = 17;
    for (uint64_t bytes : sizes) {
      state.extents.push_back(random_bytes(bytes, ++seed));
      structure = structure * 31 + bytes;
    }
    state.blob = random_bytes(50 + structure % 50, structure);
    state.host = random_bytes(host_bytes, ++seed);
    return state;
  }
  std::vector<uint64_t> sizes() const {
    std::vector<uint64_t> bytes;
    for (const Buffer& extent : extents) bytes.push_back(extent.size());
    return bytes;
  }
};

inline Status begin(Store* store, const State& state, uint32_t keep, Attempt* attempt) {
  return store->begin(state.step, keep, state.sizes(), state.blob, state.host.size(), attempt);
}

// Copies every extent into the attempt's area, chunk by chunk; returns the checksum table.
inline std::vector<uint32_t> write_extents(Store* store, const Attempt& attempt,
                                           const State& state) {
  std::vector<uint32_t> table;
  for (size_t i = 0; i < state.extents.size(); ++i) {
    const Bytes extent = state.extents[i];
    const uint64_t offset = attempt.slot.record_offset + attempt.layout->extent_offsets[i];
    for (uint64_t at = 0; at < extent.size(); at += kChunkBytes) {
      const Bytes chunk = extent.subspan(at, std::min(kChunkBytes, extent.size() - at));
      table.push_back(store->media().nt_copy_crc(offset + at, chunk));
    }
  }
  store->media().fence();
  return table;
}

inline Status save(Store* store, const State& state, uint32_t keep) {
  Attempt attempt;
  RETURN_IF_ERROR(begin(store, state, keep, &attempt));
  return store->commit(attempt, write_extents(store, attempt, state), state.host);
}

// The version is undamaged and, down to the last byte, this state.
inline testing::AssertionResult holds(Store* store, const Version& version, const State& state) {
  const auto no = [&](const std::string& why) {
    return testing::AssertionFailure()
           << "version " << version.slot.version << " (step " << version.slot.step << ") " << why;
  };
  if (!version.damage.ok()) return no("is damaged: " + version.damage.message());
  if (version.slot.step != state.step) return no("is not of step " + std::to_string(state.step));
  if (version.layout->extent_bytes != state.sizes()) return no("has other extents");
  if (!std::ranges::equal(version.blob, state.blob)) return no("has another blob");
  const uint32_t* table = nullptr;
  Bytes host;
  const Status status = decode_record(store->media(), version.slot, *version.layout, &table, &host);
  if (!status.ok()) return no("has a bad record: " + status.message());
  if (!std::ranges::equal(host, state.host)) return no("has another host state");
  for (size_t i = 0; i < state.extents.size(); ++i) {
    const std::byte* begin =
        store->media().view() + version.slot.record_offset + version.layout->extent_offsets[i];
    const Buffer& extent = state.extents[i];
    if (!std::equal(extent.begin(), extent.end(), begin)) {
      return no("has other bytes in extent " + std::to_string(i));
    }
    for (uint64_t at = 0; at < extent.size(); at += kChunkBytes, ++table) {
      const uint64_t bytes = std::min(kChunkBytes, extent.size() - at);
      if (crc32c(0, begin + at, bytes) != *table) {
        return no("has a wrong checksum in extent " + std::to_string(i));
      }
    }
  }
  return testing::AssertionSuccess();
}

// "3.1 2.1": version and generation, newest first, with a "!" behind what is damaged.
inline std::string list_of(const std::vector<Version>& versions) {
  std::string list;
  for (const Version& version : versions) {
    if (!list.empty()) list += ' ';
    list += std::to_string(version.slot.version) + "." + std::to_string(version.slot.generation);
    if (!version.damage.ok()) list += '!';
  }
  return list;
}

inline std::unique_ptr<Store> heap_store(uint64_t bytes, uint64_t capacity = 0,
                                         uint32_t slots = 16) {
  StoreOptions options;
  options.slots = slots;
  std::unique_ptr<Store> store;
  EXPECT_TRUE(
      is_ok(Store::open(std::make_unique<HeapMedia>(bytes, capacity), options, true, &store)));
  return store;
}

// A store found on these bytes, as after a restart.
inline Status open_bytes(Bytes bytes, std::unique_ptr<Store>* store) {
  auto media = std::make_unique<HeapMedia>(bytes.size());
  media->store(0, bytes);
  return Store::open(std::move(media), {}, false, store);
}

inline Bytes all_of(Store* store) { return Bytes(store->media().view(), store->media().size()); }

inline std::unique_ptr<Store> reopened(Store* store) {
  std::unique_ptr<Store> again;
  EXPECT_TRUE(is_ok(open_bytes(all_of(store), &again)));
  return again;
}

}  // namespace lightckpt
