// The seeds. Their names say what is odd about them. See seeds.h.
#include "seeds.h"

namespace lightckpt::fuzz {
namespace {

constexpr uint32_t kSlots = 4;
constexpr uint64_t kPage = kPageBytes;

// Commit a known structure, commit a new one, drop one, rebase, commit.
constexpr std::array<uint8_t, kActions> kAll = {4 * 5 + 2, 4 * 8 + 2, 4 * 3 + 3, 4 * 1 + 1, 4 + 2};

// Version `number` in pages of its own, as a writer would place it.
Planted usual(uint32_t number) {
  Planted planted;
  planted.index = number - 1;
  planted.version = planted.step = number;
  planted.manifest_offset = heap_offset(kSlots);
  planted.record_offset = heap_offset(kSlots) + (2 * number - 1) * kPage;
  return planted;
}

Input with(std::vector<Planted> versions, uint32_t pages = 14, uint32_t slots = kSlots) {
  Input input;
  input.image = empty_store(slots, pages);
  for (const Planted& planted : versions) plant(&input.image, planted);
  seal(&input.image, 0);  // of what overlaps, the last one is right
  input.keep = 1;         // so two are kept
  input.actions = kAll;
  return input;
}

template <typename Change>
Input changed(Change change, uint32_t number = 2) {
  std::vector<Planted> versions = {usual(1), usual(2)};
  change(&versions[number - 1]);
  return with(versions);
}

Input many_slots_one_manifest() {
  Planted large;
  large.manifest_offset = heap_offset(kSlotsMax);
  large.extents.assign(3000, 0);
  large.record_offset = heap_offset(kSlotsMax) + 6 * kPage;
  std::vector<Planted> versions;
  for (uint32_t index = 0; index < kSlotsMax; ++index) {
    large.index = index;
    large.version = index + 1;
    versions.push_back(large);
  }
  return with(versions, 75, kSlotsMax);
}

// The newest slot of version 5 cannot be loaded, and an older one can: it is the latest.
Input damaged_slot_before_a_whole_one() {
  std::vector<Planted> versions = {usual(1), usual(2), usual(3)};
  versions[0].version = versions[1].version = 5;
  versions[0].generation = 9;
  versions[0].record_offset = uint64_t{1} << 40;
  versions[1].generation = 2;
  versions[2].version = 7;
  Input input = with(versions);
  input.keep = 0;  // so one is kept
  return input;
}

}  // namespace

std::vector<std::pair<std::string, Input>> seeds() {
  std::vector<std::pair<std::string, Input>> all;
  const auto add = [&](const std::string& name, Input input) { all.emplace_back(name, input); };
  add("empty", with({}));
  add("whole", with({usual(1), usual(2), usual(3)}));
  add("cut", with({usual(1), usual(2)}, 8));
  add("slots_that_share_a_large_manifest", many_slots_one_manifest());
  add("damaged_slot_before_a_whole_one", damaged_slot_before_a_whole_one());
  add("version_at_the_end", changed([](Planted* p) { p->version = UINT64_MAX; }));
  add("version_one_before", changed([](Planted* p) { p->version = UINT64_MAX - 1; }));
  add("version_zero", changed([](Planted* p) { p->version = 0; }));
  add("generation_at_the_end", changed([](Planted* p) { p->generation = UINT32_MAX; }));
  add("step_at_the_end", changed([](Planted* p) { p->step = UINT64_MAX; }));
  add("same_version_twice", changed([](Planted* p) { p->version = 1; }));
  add("same_area_twice", changed([](Planted* p) { p->record_offset = usual(1).record_offset; }));
  add("areas_that_overlap", changed([](Planted* p) { p->record_offset -= kPage; }));
  add("area_over_the_header", changed([](Planted* p) { p->record_offset = 0; }));
  add("area_over_the_slots", changed([](Planted* p) { p->record_offset = slot_offset(2); }));
  add("manifest_over_a_slot", changed([](Planted* p) { p->manifest_offset = slot_offset(3); }));
  add("manifest_in_a_page_of_a_slot",
      changed([](Planted* p) { p->manifest_offset = slot_offset(3) + 1000; }));
  add("manifest_in_its_own_area",
      changed([](Planted* p) { p->manifest_offset = p->record_offset + kPage + 1024; }));
  add("manifest_in_another_area",
      changed([](Planted* p) { p->manifest_offset = usual(1).record_offset + kPage + 1024; }));
  add("manifest_at_an_odd_place",
      changed([](Planted* p) { p->manifest_offset = heap_offset(kSlots) + 1003; }));
  add("no_extents", changed([](Planted* p) { p->extents.clear(); }));
  add("extents_of_no_bytes", changed([](Planted* p) { p->extents = {0, 0, 0}; }));
  add("extent_as_large_as_the_store", changed([](Planted* p) { p->extents = {14 * kPage}; }));
  add("no_blob_and_no_host_state", changed([](Planted* p) { p->blob_bytes = p->host_bytes = 0; }));
  return all;
}

}  // namespace lightckpt::fuzz
