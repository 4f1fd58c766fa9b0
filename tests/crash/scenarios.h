// The lives that are crashed, each with slots as lines, then with a catalog, and then with extents
// that a device writes. They are short: what matters is which orders of events they have.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "life.h"

namespace lightckpt {

struct Scenario {
  std::string name;
  uint32_t keep;
  uint64_t bytes;  // of the store at first
  std::function<void(Life*, const std::vector<uint64_t>& sizes)> live;
  CatalogKind catalog = CatalogKind::kLines;
  bool dma = false;
};

const std::vector<Scenario>& scenarios();
History history_of(const Scenario& scenario, Model model);
// On pages whole ones for each batch, so that no range of a drain is there by another's grace.
const std::vector<uint64_t>& sizes_for(Model model);

}  // namespace lightckpt
