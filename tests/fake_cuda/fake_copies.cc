// Finding both sides of a copy, and batches of copies. See fake_copies.h.
#include "fake_copies.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace fake_cuda {

int host_side(uint64_t address, uint64_t bytes, bool written, Side* side) {
  const Memory* const memory = World::find(world().host_memory, address, bytes);
  *side = {.host = reinterpret_cast<std::byte*>(address), .address = address, .on_host = true};
  if (memory != nullptr) {
    side->in = &world().host_memory;
    side->number = memory->number;
    side->registered = memory->registered;
    if (!written || !memory->read_only) return kOk;
    return world().misuse("a copy into memory that is read only", kInvalidValue);
  }
  if (World::touches(world().host_memory, address, bytes)) {
    return world().misuse("a copy across pieces of host memory", kInvalidValue);
  }
  ++world().unregistered_copies;
  return kOk;
}

int device_side(uint64_t address, uint64_t bytes, Side* side) {
  const Memory* const memory = World::find(world().device_memory, address, bytes);
  if (memory != nullptr) {
    *side = {.host = memory->host + (address - memory->address),
             .in = &world().device_memory,
             .address = address,
             .number = memory->number};
    return kOk;
  }
  *side = {.host = reinterpret_cast<std::byte*>(address), .address = address};
  if (world().rules.any_address != 0) return kOk;
  return world().misuse("a copy of no device memory", kInvalidValue);
}

int copy_late(Stream* stream, const Copy& copy) {
  if (stream->capturing) return world().misuse("a copy into a graph", kOk);
  auto work = [copy] { world().copy(copy); };
  world().enqueue(stream, {Op::Kind::kWork, work, nullptr});
  return kOk;
}

namespace {

constexpr size_t kNoCopy = SIZE_MAX;

// CUmemcpyAttributes, from cuda.h.
struct Attributes {
  int source_order;
  int hints[4];
  unsigned flags;
};

struct Batch {
  const uint64_t* targets;
  const uint64_t* sources;
  const size_t* sizes;
  size_t count;
  const Attributes* attributes;
  const size_t* indexes;
  size_t attribute_count;
};

// The rules of cuMemcpyBatchAsync in CUDA's documents: the indexes rise from 0 and stay below the
// count. Of the orders in which sources may be read only the stream's lets a later update wait.
int check_attributes(const Batch& batch) {
  constexpr int kInStreamOrder = 1;
  if (batch.attribute_count == 0 || batch.attribute_count > batch.count) {
    return world().misuse("a batch with attributes for more copies than it has", kInvalidValue);
  }
  for (size_t i = 0; i < batch.attribute_count; ++i) {
    const bool rises = i == 0 ? batch.indexes[0] == 0 : batch.indexes[i] > batch.indexes[i - 1];
    if (!rises || batch.indexes[i] >= batch.count) {
      return world().misuse("a batch whose attributes' indexes do not rise from 0", kInvalidValue);
    }
    if (batch.attributes[i].source_order != kInStreamOrder || batch.attributes[i].flags > 1) {
      return world().misuse("a batch that is not read in the stream's order", kInvalidValue);
    }
  }
  // One set of attributes is of all copies. Drivers are feared to look for an index of each of them
  // even so (vllm-project/vllm pull request 53860), and would find what lies behind the first.
  const auto is_first = [](size_t index) { return index == 0; };
  if (batch.attribute_count == 1 &&
      !std::all_of(batch.indexes, batch.indexes + batch.count, is_first)) {
    return world().misuse("a batch without an index for each copy", kInvalidValue);
  }
  return kOk;
}

// One side of a copy in a batch, which may be on the device or not. Pageable memory is refused:
// what becomes of it, documents do not say.
int any_side(uint64_t address, uint64_t bytes, bool written, Side* side) {
  const bool known = World::find(world().device_memory, address, bytes) != nullptr;
  const bool pinned = World::touches(world().host_memory, address, bytes);
  if (known || (world().rules.any_address != 0 && !pinned)) {
    return device_side(address, bytes, side);
  }
  if (!pinned) return world().misuse("a batch with pageable memory", kInvalidValue);
  return host_side(address, bytes, written, side);
}

// A device whose attribute 91 is 0 has other addresses for registered memory. A batch is not
// translated: it faults when the stream gets there (met with WSL2, sgl-project/sglang issue 40232).
bool faults(const Stream& stream, const Copy& copy) {
  if (!copy.target.registered && !copy.source.registered) return false;
  return world().attribute(world().contexts[stream.context].device, kHostPointers) == 0;
}

int fault_late(Stream* stream) {
  auto work = [context = stream->context] {
    const World::Lock lock = world().locked();
    world().misuse("a batch with registered memory that the device has elsewhere", kOk);
    world().lose(context, kIllegalAddress);
  };
  world().enqueue(stream, {Op::Kind::kWork, work, nullptr});
  return kOk;
}

int copy_one(Stream* stream, const Batch& batch, size_t i) {
  if (batch.sizes[i] == 0) return kInvalidValue;
  Copy copy = {.bytes = batch.sizes[i]};
  int result = any_side(batch.targets[i], copy.bytes, true, &copy.target);
  if (result == kOk) result = any_side(batch.sources[i], copy.bytes, false, &copy.source);
  if (result != kOk) return result;
  return faults(*stream, copy) ? fault_late(stream) : copy_late(stream, copy);
}

// In no order among themselves: from the last to the first. Where one is refused, those before it
// are on their way.
int copy_batch(Stream* stream, const Batch& batch, size_t* failed) {
  if (world().options().copies_singly != 0) return kNotSupported;
  if (const int refused = check_attributes(batch); refused != kOk) return refused;
  for (size_t i = batch.count; i-- > 0;) {
    const int result = copy_one(stream, batch, i);
    if (result == kOk) continue;
    *failed = i;
    return result;
  }
  return kOk;
}

}  // namespace
}  // namespace fake_cuda

// As CUDA 12.8 brought it. The legacy stream is refused: its documents say so, and it is an invalid
// value (met with CUDA 13.0 on an H100, vllm-project/vllm pull request 46379).
FAKE_CUDA_EXPORT int cuMemcpyBatchAsync(uint64_t* targets, uint64_t* sources, size_t* sizes,
                                        size_t count, void* attributes, size_t* indexes,
                                        size_t attribute_count, size_t* failed,
                                        fake_cuda::Handle handle) {
  using fake_cuda::world;
  const auto body = [&](fake_cuda::Stream* stream, fake_cuda::World::Lock&) {
    *failed = fake_cuda::kNoCopy;
    if (handle <= 1) {
      return world().misuse("a batch on the legacy stream", fake_cuda::kInvalidValue);
    }
    const fake_cuda::Batch batch = {targets,
                                    sources,
                                    sizes,
                                    count,
                                    static_cast<const fake_cuda::Attributes*>(attributes),
                                    indexes,
                                    attribute_count};
    return fake_cuda::copy_batch(stream, batch, failed);
  };
  return fake_cuda::with_stream("cuMemcpyBatchAsync", handle, body);
}
