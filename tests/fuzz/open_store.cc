// The harness: a store found on hostile bytes is opened, read, written to and opened again.
//
//   1. No byte outside the media is touched (the address sanitizer), and no broken invariant of
//      the core's own is met, whatever the bytes say.
//   2. Opening and reading ask for memory in proportion to the media.
//   3. What is committed after such an open is, after the next one, the latest version, bit for
//      bit; what is made the latest again, too. Or it was refused in words, and nothing changed.
//   4. No version that was whole is changed; the newest that was known is still there.
//
// libFuzzer calls LLVMFuzzerTestOneInput and LLVMFuzzerCustomMutator; fuzz_replay (replay.cc) the
// same two without it.
#include "open_store.h"

#include <algorithm>
#include <optional>

#include "allocations.h"
#include "crc32c.h"
#include "file_media.h"
#include "image.h"
#include "store.h"

namespace lightckpt::fuzz {
namespace {

constexpr uint64_t kGrowth = 16 * kPageBytes;  // that a store may grow by
constexpr size_t kLookedAt = 4;  // versions that are found one by one, each by a look at all slots
constexpr uint64_t kAllocatedPerByte = 8, kAllocatedAnyway = 1 << 18;

// A version that has been read whole.
struct Whole {
  Slot slot = {};
  uint32_t index = 0;
  uint32_t digest = 0;  // of all that a reader may see
};

// Reads everything that a version holds; nothing where any of it is damaged.
std::optional<Whole> read_whole(const Media& media, const Version& version) {
  CHECK(version.damage.ok() || !version.damage.message().empty());
  if (!version.damage.ok()) return std::nullopt;
  const uint32_t* table = nullptr;
  Bytes host;
  const Layout& layout = *version.layout;
  if (!decode_record(media, version.slot, layout, &table, &host).ok()) return std::nullopt;
  uint32_t digest = crc32c(0, version.blob.data(), version.blob.size());
  digest = crc32c(digest, host.data(), host.size());
  for (size_t i = 0; i < layout.extent_bytes.size(); ++i) {
    const std::byte* begin = media.view() + version.slot.record_offset + layout.extent_offsets[i];
    for (uint64_t at = 0; at < layout.extent_bytes[i]; at += kChunkBytes, ++table) {
      const uint64_t bytes = std::min(kChunkBytes, layout.extent_bytes[i] - at);
      if (crc32c(0, begin + at, bytes) != *table) return std::nullopt;
    }
    digest = crc32c(digest, begin, layout.extent_bytes[i]);
    digest = crc32c(digest, &layout.extent_bytes[i], sizeof(uint64_t));
  }
  return Whole{version.slot, version.index, digest};
}

std::vector<Whole> read_all(Store* store) {
  std::vector<Whole> found;
  for (const Version& version : store->versions()) {
    if (auto whole = read_whole(store->media(), version)) found.push_back(*whole);
  }
  return found;
}

Status open_on(Bytes image, bool read_only, uint64_t growth, std::unique_ptr<Store>* store) {
  auto media = std::make_unique<HeapMedia>(image.size(), image.size() + growth);
  media->store(0, image);
  StoreOptions options;
  options.read_only = read_only;
  const AllocationLimit limit(image.size() * kAllocatedPerByte + kAllocatedAnyway);
  return Store::open(std::move(media), options, false, store);
}

class Run {
 public:
  explicit Run(Input input) : input_(std::move(input)) {}

  void run() {
    look();
    const Status status = open_on(input_.image, false, kGrowth, &store_);
    CHECK(status.ok() || !status.message().empty());
    if (!status.ok()) return;
    for (uint8_t action : input_.actions) {
      if (action % 4 == 1) rebase(action / 4);
      if (action % 4 >= 2) commit(action / 4, action % 4 == 2);
    }
  }

 private:
  // As a reader that may see the store and not change it.
  void look() {
    std::unique_ptr<Store> reader;
    const Status status = open_on(input_.image, true, 0, &reader);
    CHECK(status.ok() || !status.message().empty());
    if (!status.ok()) return;
    const AllocationLimit limit(input_.image.size() * kAllocatedPerByte * 4 + kAllocatedAnyway);
    std::vector<Version> versions = reader->versions();
    versions.resize(std::min(versions.size(), kLookedAt));
    for (const Version& version : versions) {
      CHECK(version.slot.version != 0);  // which names the version in flight
      Version found;
      CHECK(reader->find(version.slot.version, &found).ok() == version.damage.ok());
      CHECK(read_whole(reader->media(), found).has_value() ==
            read_whole(reader->media(), version).has_value());
      (void)reader->pin(version.slot.version, true).ok();
    }
    CHECK(reader->free_bytes() <= reader->media().size());
    Attempt attempt;
    CHECK(!reader->begin(1, 1, {}, {}, 0, &attempt).ok());
  }

  // The store as the next process finds it.
  std::unique_ptr<Store> reopened() {
    std::unique_ptr<Store> again;
    CHECK(open_on(Bytes(store_->media().view(), store_->media().size()), false, 0, &again).ok());
    return again;
  }

  static const Whole* same_slot(const std::vector<Whole>& list, const Whole& whole) {
    const auto found = std::ranges::find_if(list, [&](const Whole& other) {
      return other.index == whole.index && std::memcmp(&other.slot, &whole.slot, sizeof(Slot)) == 0;
    });
    return found == list.end() ? nullptr : &*found;
  }

  // Invariant 4. A version whose slot says what it said holds what it held.
  void expect_untouched(const std::vector<Whole>& before) {
    const std::unique_ptr<Store> again = reopened();
    for (Store* store : {store_.get(), again.get()}) {
      for (const Version& version : store->versions()) {
        const Whole* known = same_slot(before, {version.slot, version.index, 0});
        if (known == nullptr) continue;
        const auto now = read_whole(store->media(), version);
        CHECK(now && now->digest == known->digest);
      }
    }
  }

  // Invariant 3.
  void expect_latest(const Slot& slot, uint32_t digest) {
    const std::unique_ptr<Store> again = reopened();
    const std::vector<Version> versions = again->versions();
    CHECK(!versions.empty());
    const auto whole = read_whole(again->media(), versions.front());
    CHECK(whole && whole->digest == digest && whole->slot.step == slot.step);
    CHECK(store_->versions().front().slot.crc == whole->slot.crc);
  }

  void commit(uint32_t variant, bool finish) {
    const std::vector<Whole> before = read_all(store_.get());
    const std::vector<Version> listed = store_->versions();
    std::vector<uint64_t> extents = {variant * 16u, 0, 8};
    Bytes blob = std::as_bytes(std::span("blob"));
    if (variant % 2 == 1 && !listed.empty()) {  // of a structure that the store knows
      const Version& version = listed[variant % listed.size()];
      extents = version.layout->extent_bytes;
      blob = version.blob;
    }
    const Buffer held(blob.begin(), blob.end());  // a caller's own, not the store's
    const Buffer host(variant, std::byte{'h'});
    const uint32_t keep = 1 + input_.keep % 3;
    Attempt attempt;
    const Status status = store_->begin(77, keep, extents, held, host.size(), &attempt);
    if (!status.ok()) {
      CHECK(!status.message().empty());
      expect_untouched(before);
      return expect_kept(listed);
    }
    const uint64_t area = attempt.slot.record_offset;
    CHECK(area >= heap_offset(store_->header().slot_count) && area % kPageBytes == 0);
    CHECK(area + attempt.layout->area_bytes <= store_->media().size());
    // All of an attempt's area is its own.
    store_->media().store(area, Buffer(attempt.layout->area_bytes, std::byte{0xa5}));
    const std::vector<uint32_t> table = write_extents(attempt);
    expect_kept(listed);
    if (!finish) return expect_untouched(before);
    CHECK(store_->commit(attempt, table, host).ok());
    expect_untouched(before);
    expect_kept(listed);
    const auto whole = read_whole(store_->media(), store_->versions().front());
    CHECK(whole && std::ranges::equal(store_->versions().front().blob, held));
    expect_latest(whole->slot, whole->digest);
  }

  // Invariant 4. What was the latest to be loaded stays in its slot.
  void expect_kept(const std::vector<Version>& listed) {
    const auto latest =
        std::ranges::find_if(listed, [](const Version& version) { return version.damage.ok(); });
    if (latest == listed.end()) return;
    const Slot slot = get_slot(latest->index);
    CHECK(std::memcmp(&slot, &latest->slot, sizeof(slot)) == 0);
  }

  Slot get_slot(uint32_t index) {
    Slot slot;
    std::memcpy(&slot, store_->media().view() + slot_offset(index), sizeof(slot));
    return slot;
  }

  std::vector<uint32_t> write_extents(const Attempt& attempt) {
    std::vector<uint32_t> table;
    for (size_t i = 0; i < attempt.layout->extent_bytes.size(); ++i) {
      const uint64_t bytes = attempt.layout->extent_bytes[i];
      const uint64_t offset = attempt.slot.record_offset + attempt.layout->extent_offsets[i];
      const Buffer data(std::min(bytes, kChunkBytes), static_cast<std::byte>(i + 1));
      for (uint64_t at = 0; at < bytes; at += kChunkBytes) {
        const Bytes chunk = Bytes(data).first(std::min(kChunkBytes, bytes - at));
        table.push_back(store_->media().nt_copy_crc(offset + at, chunk));
      }
    }
    store_->media().fence();
    return table;
  }

  void rebase(uint32_t choice) {
    const std::vector<Whole> before = read_all(store_.get());
    if (before.empty()) return;
    const Whole& chosen = before[choice % before.size()];
    const std::vector<Version> listed = store_->versions();
    const Status status = store_->rebase(chosen.slot.version);
    CHECK(status.ok() || !status.message().empty());
    expect_untouched(before);
    if (status.ok()) return expect_latest(chosen.slot, chosen.digest);
    expect_kept(listed);
  }

  Input input_;
  std::unique_ptr<Store> store_;
};

}  // namespace

void run_input(Bytes input) { Run(decode_input(input)).run(); }

}  // namespace lightckpt::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  lightckpt::fuzz::run_input(std::as_bytes(std::span(data, size)));
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  using namespace lightckpt::fuzz;
  Random random(seed);
  Input input = decode_input(std::as_bytes(std::span(data, size)));
  mutate(&input, &random);
  const Buffer bytes = encode_input(input);
  if (bytes.size() > max_size) return size;
  std::memcpy(data, bytes.data(), bytes.size());
  return bytes.size();
}
