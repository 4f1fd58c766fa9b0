// The worked example of docs/FORMAT.md: one version in a store whose id and time are known.
#pragma once

#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "format.h"
#include "store_helpers.h"

namespace lightckpt {

inline constexpr uint64_t kStoreId = 0xa4d7429139008241;
inline constexpr uint64_t kCreated = 0x18ec09cce4c9c220;
inline constexpr uint64_t kManifest = 0x11000, kRecord = 0x12000, kExtents = 0x13000;
inline constexpr uint64_t kExampleBytes = 22 * kPageBytes;

// Its parts besides zeros: offset and bytes.
inline const std::vector<std::pair<uint64_t, uint64_t>> kParts = {
    {0, 64},           {kPageBytes, 64}, {kManifest, 40 + 2 * 8 + 10},
    {kRecord, 64 + 5}, {kExtents, 24},   {kExtents + 256, 8}};

template <typename Plain>
Buffer bytes_of_all(std::initializer_list<Plain> values) {
  const Bytes bytes = std::as_bytes(std::span(values.begin(), values.size()));
  return Buffer(bytes.begin(), bytes.end());
}

inline State example_state() {
  State state;
  state.step = 7;
  state.extents = {bytes_of_all({1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f}), bytes_of_all({1.5})};
  state.blob = bytes_of_all({'{', '"', 'd', 'e', 'm', 'o', '"', ':', '1', '}'});
  state.host = bytes_of_all({'h', 'e', 'l', 'l', 'o'});
  return state;
}

// Written by the store itself, behind a header that is not drawn at random.
inline Buffer example() {
  auto media = std::make_unique<HeapMedia>(kExampleBytes);
  const Header header = encode_header(kStoreId, 16, kCreated);
  media->store(0, std::as_bytes(std::span(&header, 1)));
  std::unique_ptr<Store> store;
  EXPECT_TRUE(is_ok(Store::open(std::move(media), {}, false, &store)));
  EXPECT_TRUE(is_ok(save(store.get(), example_state(), 1)));
  return Buffer(all_of(store.get()).begin(), all_of(store.get()).end());
}

}  // namespace lightckpt
