// A limit on the memory that is asked for: what hostile bytes claim must not be believed.
//
// Counts what malloc gives out and takes back, under the address sanitizer. For one thread, and not
// nested.
#pragma once

#include <cstdint>

namespace lightckpt::fuzz {

// Within its scope, to hold more than `bytes` beyond what was held before stops the process.
class AllocationLimit {
 public:
  explicit AllocationLimit(uint64_t bytes);
  AllocationLimit(const AllocationLimit&) = delete;
  AllocationLimit& operator=(const AllocationLimit&) = delete;
  ~AllocationLimit();
};

}  // namespace lightckpt::fuzz
