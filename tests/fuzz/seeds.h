// Stores to start from, by name: a whole one, and those whose numbers are at an edge.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "image.h"

namespace lightckpt::fuzz {

std::vector<std::pair<std::string, Input>> seeds();

}  // namespace lightckpt::fuzz
