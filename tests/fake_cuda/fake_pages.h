// What lies at addresses of this process: pages for allocations, and what a registration meets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fake_world.h"

namespace fake_cuda {

// Memory for an allocation, on page borders as CUDA's is, with its address and its bytes. That of a
// device has an address at which the host finds nothing, and its bytes elsewhere.
Memory new_memory(uint64_t bytes, bool on_device);
void free_memory(const Memory& memory);

enum class Mapped { kNo, kToRead, kToWrite };

// How all of a range is mapped: what none of its pages falls short of. A range whose last page is
// behind the end of its file is not mapped.
Mapped how_mapped(uint64_t address, uint64_t bytes);

}  // namespace fake_cuda
