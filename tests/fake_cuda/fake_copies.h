// What copies are made of, whether they come one by one or in batches.
#pragma once

#include "fake_calls.h"

namespace fake_cuda {

// A host range that copies may use: pinned or registered, in one piece; or pageable, which counts.
int host_side(uint64_t address, uint64_t bytes, bool written, Side* side);
int device_side(uint64_t address, uint64_t bytes, Side* side);
int copy_late(Stream* stream, const Copy& copy);

}  // namespace fake_cuda
