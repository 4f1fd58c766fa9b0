// Inputs of the fuzzer: a small store and what to do with it, short enough to be mutated.
//
//   input := pages: u8, tail: u8, keep: u8, actions: 5 x u8, part...
//   part  := offset: u32, count: u16, bytes
//
// The store has (1 + pages % kPagesMax) * 4096 + tail * 16 bytes, and zeros where no part says
// otherwise. Every string of bytes is an input, and every store has one.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "format.h"

namespace lightckpt::fuzz {

using Buffer = std::vector<std::byte>;
using Random = std::mt19937_64;

inline constexpr uint32_t kPagesMax = 96;
inline constexpr uint32_t kActions = 5;

struct Input {
  Buffer image;
  uint8_t keep = 1;
  std::array<uint8_t, kActions> actions = {};
};

Input decode_input(Bytes bytes);
// Sizes that no input has are rounded down.
Buffer encode_input(const Input& input);

template <typename Plain>
Plain get(const Buffer& image, uint64_t offset) {
  Plain value = {};
  if (offset <= image.size() && sizeof(value) <= image.size() - offset) {
    std::memcpy(&value, image.data() + offset, sizeof(value));
  }
  return value;
}

// What lies outside the image is left out.
void put_bytes(Buffer* image, uint64_t offset, Bytes bytes);
template <typename Plain>
void put(Buffer* image, uint64_t offset, const Plain& value) {
  put_bytes(image, offset, std::as_bytes(std::span(&value, 1)));
}

// A version to plant: where it lies is the caller's choice, and may be nonsense.
struct Planted {
  uint32_t index = 0;
  uint32_t generation = 0;
  uint64_t version = 1;
  uint64_t step = 1;
  uint64_t manifest_offset = 0;
  uint64_t record_offset = 0;
  std::vector<uint64_t> extents = {24, 8};
  uint64_t blob_bytes = 10;
  uint64_t host_bytes = 5;
};

inline constexpr uint64_t kStoreId = 0xa4d7429139008241;

Buffer empty_store(uint32_t slots, uint32_t pages);
// Writes manifest, extents, record and slot, with right checksums where they do not overlap.
void plant(Buffer* image, const Planted& planted);

// What `seal` makes right again besides the checksums.
enum Repair : uint32_t { kChunkSums = 1, kRecordHead = 2, kManifestHead = 4, kIds = 8 };

// Makes every checksum right again, so that only what they guard is wrong.
void seal(Buffer* image, uint32_t repairs);

// Changes a few things in an input; nearly always its checksums are right afterwards.
void mutate(Input* input, Random* random);

}  // namespace lightckpt::fuzz
