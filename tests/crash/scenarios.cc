// See scenarios.h.
#include "scenarios.h"

#include <set>

namespace lightckpt {
namespace {

using Sizes = std::vector<uint64_t>;

constexpr uint64_t kSmall = 48 * 1024, kLarge = 96 * 1024;

void save_all(Life* life, uint64_t first, uint64_t last, const Sizes& sizes) {
  for (uint64_t step = first; step <= last; ++step) life->save(step, sizes);
}

// A layer that trains again has its tensors among the extents.
Sizes with_more(Sizes sizes) {
  sizes.push_back(200);
  return sizes;
}

std::vector<Scenario> lives() {
  return {
      {"first commit", 1, kSmall, [](Life* life, const Sizes& sizes) { life->save(1, sizes); }},
      {"steady state", 1, kSmall, [](Life* life, const Sizes& s) { save_all(life, 1, 5, s); }},
      {"keep 3", 3, kLarge, [](Life* life, const Sizes& s) { save_all(life, 1, 7, s); }},
      {"manifest change", 1, kLarge,
       [](Life* life, const Sizes& sizes) {
         save_all(life, 1, 3, sizes);
         save_all(life, 4, 6, with_more(sizes));
         save_all(life, 7, 8, sizes);
       }},
      {"record outgrown", 1, kLarge,
       [](Life* life, const Sizes& sizes) {
         save_all(life, 1, 2, sizes);
         life->save(3, sizes, 5000);
         life->save(4, sizes, 5100);
         life->save(5, sizes, 100);
       }},
      {"dropped versions", 1, kSmall,
       [](Life* life, const Sizes& sizes) {
         save_all(life, 1, 2, sizes);
         life->drop(3, sizes);
         life->drop(4, sizes);
         save_all(life, 5, 6, sizes);
         life->drop(7, sizes);
         life->save(8, sizes);
       }},
      {"dropped structures", 1, kLarge,
       [](Life* life, const Sizes& sizes) {
         save_all(life, 1, 2, sizes);
         life->drop(3, with_more(sizes));
         life->drop(4, with_more(with_more(sizes)));
         life->drop(5, with_more(sizes));
         save_all(life, 6, 7, with_more(sizes));
       }},
      {"pinned version", 1, kLarge,
       [](Life* life, const Sizes& sizes) {
         save_all(life, 1, 2, sizes);
         life->pin(1, true);
         save_all(life, 3, 5, sizes);
         life->pin(1, false);
         save_all(life, 6, 7, sizes);
       }},
      {"rebase, keep 1", 1, kLarge,
       [](Life* life, const Sizes& sizes) {
         save_all(life, 1, 3, sizes);
         life->rebase(2);
         save_all(life, 4, 7, sizes);
       }},
      {"rebase, keep 3", 3, kLarge,
       [](Life* life, const Sizes& sizes) {
         save_all(life, 1, 4, sizes);
         life->rebase(2);
         save_all(life, 5, 6, sizes);
         life->rebase(life->listed()[1]);
         save_all(life, 7, 9, sizes);
       }},
      {"growth", 1, 32 * 1024,
       [](Life* life, const Sizes& sizes) {
         save_all(life, 1, 2, sizes);
         life->save(3, with_more(sizes));
         life->save(4, with_more(sizes), 9000);
       }},
  };
}

}  // namespace

const std::vector<uint64_t>& sizes_for(Model model) {
  static const Sizes on_lines = {1400, 0, 300, 20}, on_pages = {4096};
  return model == Model::kPage ? on_pages : on_lines;
}

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = [] {
    std::vector<Scenario> both = lives();
    for (Scenario scenario : lives()) {
      scenario.name = "catalog, " + scenario.name;
      scenario.catalog = CatalogKind::kPmemobj;
      both.push_back(std::move(scenario));
    }
    for (Scenario scenario : lives()) {
      static const std::set<std::string> kWithDma = {"first commit", "steady state", "growth",
                                                     "manifest change", "dropped versions"};
      if (!kWithDma.contains(scenario.name)) continue;
      scenario.name = "device, " + scenario.name;
      scenario.dma = true;
      both.push_back(std::move(scenario));
    }
    return both;
  }();
  return all;
}

History history_of(const Scenario& scenario, Model model) {
  History history = History::of(model, scenario.keep, scenario.bytes, scenario.catalog);
  history.dma = scenario.dma;
  Life life(&history);
  scenario.live(&life, sizes_for(model));
  return history;
}

}  // namespace lightckpt
