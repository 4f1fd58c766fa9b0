// The worked example of docs/FORMAT.md: one version in a store whose id and time are known.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "format.h"
#include "store_helpers.h"

namespace lightckpt {

inline constexpr uint64_t kStoreId = 0x1122334455667788;
inline constexpr uint64_t kCreated = 1'700'000'000'000'000'000;
inline constexpr uint32_t kSlots = 4;
inline constexpr uint64_t kManifest = 0x5000, kRecord = 0x6000;

inline Buffer bytes_of_text(const std::string& text) {
  Buffer bytes;
  for (char letter : text) bytes.push_back(static_cast<std::byte>(letter));
  return bytes;
}

// The worked example: one version of step 7, with three extents of 5, 0 and 300 bytes.
inline State example_state() {
  State state;
  state.step = 7;
  state.extents = {bytes_of_text("hello"), {}, Buffer(300, std::byte{0x2a})};
  state.blob = bytes_of_text("manifest");
  state.host = bytes_of_text("host state");
  return state;
}

inline Buffer example() {
  auto media = std::make_unique<HeapMedia>(14 * kPageBytes);
  const Header header = encode_header(kStoreId, kSlots, kCreated);
  media->store(0, std::as_bytes(std::span(&header, 1)));
  std::unique_ptr<Store> store;
  EXPECT_TRUE(is_ok(Store::open(std::move(media), {}, false, &store)));
  EXPECT_TRUE(is_ok(save(store.get(), example_state(), 1)));
  return Buffer(all_of(store.get()).begin(), all_of(store.get()).end());
}

// What the example consists of besides zeros and the extents' bytes.
inline const std::vector<std::pair<uint64_t, uint64_t>> kParts = {
    {0, 64}, {kPageBytes, 64}, {kManifest, 40 + 3 * 8 + 8}, {kRecord, 64 + 10}};

}  // namespace lightckpt
