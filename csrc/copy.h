// Copies that go around the cache, checksums in the same loop, and cache-line write-back: the
// instructions of persistent memory.
//
// Non-temporal stores spare the read for ownership, so a large copy runs at memcpy's speed and
// leaves the trainer's cache alone. One stream at a time: several interleaved ones defeat the
// write-combining buffers. Nothing here orders anything: the caller fences, on the same thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "instruction_set.h"

namespace lightckpt {

enum class FlushMethod : uint32_t { kNone = 0, kClflush, kClflushopt, kClwb, kMsync };

// Copies `bytes` bytes; whole target lines by non-temporal stores, ragged ends by plain ones.
void copy_nt(void* target, const void* source, size_t bytes);

// The same, and returns the CRC-32C that continues `crc` over exactly the bytes that were stored,
// whatever becomes of the source meanwhile.
uint32_t copy_nt_crc(void* target, const void* source, size_t bytes, uint32_t crc = 0);

// The best write-back instruction this processor has.
FlushMethod best_flush_method();

// Starts writing back every line that [address, address + bytes) touches.
void write_back(FlushMethod method, const void* address, size_t bytes);

// Waits until this thread's non-temporal stores and write-backs have reached the media.
void store_fence();

}  // namespace lightckpt
