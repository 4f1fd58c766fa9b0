// The fake driver's calls on memory, and copies. See fake_cuda.h.
#include "fake_calls.h"

namespace {

using fake_cuda::call;
using fake_cuda::Copy;
using fake_cuda::give_back;
using fake_cuda::Handle;
using fake_cuda::Memories;
using fake_cuda::Memory;
using fake_cuda::Needs;
using fake_cuda::Op;
using fake_cuda::Stream;
using fake_cuda::with_stream;
using fake_cuda::world;
using fake_cuda::World;

// A host range that copies may use: pinned or registered, in one piece; or pageable, which counts.
int host_side(uint64_t address, uint64_t bytes, bool written, const Memories** in) {
  const Memory* const memory = World::find(world().host_memory, address, bytes);
  if (memory != nullptr) {
    *in = &world().host_memory;
    if (!written || !memory->read_only) return fake_cuda::kOk;
    return world().misuse("a copy into memory that is read only", fake_cuda::kInvalidValue);
  }
  if (World::touches(world().host_memory, address, bytes)) {
    return world().misuse("a copy across pieces of host memory", fake_cuda::kInvalidValue);
  }
  ++world().unregistered_copies;
  *in = nullptr;
  return fake_cuda::kOk;
}

int device_side(uint64_t address, uint64_t bytes, const Memories** in) {
  *in = &world().device_memory;
  const bool there = World::find(world().device_memory, address, bytes) != nullptr;
  return there ? fake_cuda::kOk
               : world().misuse("a copy of no device memory", fake_cuda::kInvalidValue);
}

int copy_late(Stream* stream, const Copy& copy) {
  if (stream->capturing) return world().misuse("a copy into a graph", fake_cuda::kOk);
  auto work = [copy] { world().copy(copy); };
  world().enqueue(stream, {Op::Kind::kWork, work, nullptr});
  return fake_cuda::kOk;
}

int allocate(Memories* memories, uint64_t bytes, uint64_t* address) {
  if (bytes == 0) return fake_cuda::kInvalidValue;
  *address = fake_cuda::new_memory(bytes);
  const std::lock_guard lock(world().memory_mutex);
  (*memories)[*address] = {.bytes = bytes, .context = world().current()};
  return fake_cuda::kOk;
}

int release(Memories* memories, uint64_t address, bool registered, int otherwise) {
  // Waits for copies that are taking place; those that have not begun find it gone.
  const std::lock_guard lock(world().memory_mutex);
  const auto found = memories->find(address);
  if (found == memories->end() || found->second.registered != registered) {
    return world().misuse("memory that is not there is given back", otherwise);
  }
  memories->erase(found);
  if (!registered) fake_cuda::free_memory(address);
  return fake_cuda::kOk;
}

}  // namespace

FAKE_CUDA_EXPORT int cuMemcpyDtoHAsync_v2(uint64_t target, uint64_t source, size_t bytes,
                                          Handle handle) {
  return with_stream("cuMemcpyDtoHAsync", handle, [&](Stream* stream) {
    Copy copy = {target, source, bytes, nullptr, nullptr};
    int result = host_side(target, bytes, true, &copy.target_in);
    if (result == fake_cuda::kOk) result = device_side(source, bytes, &copy.source_in);
    return result == fake_cuda::kOk ? copy_late(stream, copy) : result;
  });
}

FAKE_CUDA_EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes,
                                          Handle handle) {
  return with_stream("cuMemcpyHtoDAsync", handle, [&](Stream* stream) {
    Copy copy = {target, source, bytes, nullptr, nullptr};
    int result = host_side(source, bytes, false, &copy.source_in);
    if (result == fake_cuda::kOk) result = device_side(target, bytes, &copy.target_in);
    return result == fake_cuda::kOk ? copy_late(stream, copy) : result;
  });
}

FAKE_CUDA_EXPORT int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes,
                                          Handle handle) {
  return with_stream("cuMemcpyDtoDAsync", handle, [&](Stream* stream) {
    Copy copy = {target, source, bytes, nullptr, nullptr};
    int result = device_side(source, bytes, &copy.source_in);
    if (result == fake_cuda::kOk) result = device_side(target, bytes, &copy.target_in);
    return result == fake_cuda::kOk ? copy_late(stream, copy) : result;
  });
}

// In no order among themselves: from the last to the first.
FAKE_CUDA_EXPORT int cuMemcpyBatchAsync_v2(uint64_t* targets, uint64_t* sources, size_t* sizes,
                                           size_t count, void* attributes, size_t* indexes,
                                           size_t attribute_count, Handle handle) {
  return with_stream("cuMemcpyBatchAsync", handle, [&](Stream* stream) {
    if (world().options().copies_singly != 0) return fake_cuda::kNotSupported;
    // The source in the stream's order, and from the first copy on: all that is asked for.
    if (attribute_count != 1 || indexes[0] != 0 || static_cast<int*>(attributes)[0] != 1) {
      return fake_cuda::kInvalidValue;
    }
    for (size_t i = count; i-- > 0;) {
      Copy copy = {targets[i], sources[i], sizes[i], nullptr, nullptr};
      const auto on_device = [&](uint64_t address) {
        return World::find(world().device_memory, address, sizes[i]) != nullptr;
      };
      const bool out = !on_device(targets[i]);
      const bool in = !on_device(sources[i]);
      int result = out ? host_side(targets[i], sizes[i], true, &copy.target_in)
                       : device_side(targets[i], sizes[i], &copy.target_in);
      if (result == fake_cuda::kOk) {
        result = in ? host_side(sources[i], sizes[i], false, &copy.source_in)
                    : device_side(sources[i], sizes[i], &copy.source_in);
      }
      if (result == fake_cuda::kOk && sizes[i] == 0) result = fake_cuda::kInvalidValue;
      if (result == fake_cuda::kOk) result = copy_late(stream, copy);
      if (result != fake_cuda::kOk) return result;
    }
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuMemAlloc_v2(uint64_t* memory, size_t bytes) {
  return call("cuMemAlloc", Needs::kContextUnsafeInCapture,
              [&] { return allocate(&world().device_memory, bytes, memory); });
}

FAKE_CUDA_EXPORT int cuMemFree_v2(uint64_t memory) {
  return give_back("cuMemFree", Needs::kContext, [&] {
    return release(&world().device_memory, memory, false, fake_cuda::kInvalidValue);
  });
}

FAKE_CUDA_EXPORT int cuMemHostAlloc(uint64_t* memory, size_t bytes, unsigned flags) {
  return call("cuMemHostAlloc", Needs::kContextUnsafeInCapture, [&] {
    if (flags != 1) world().misuse("pinned memory of one context only", fake_cuda::kOk);
    return allocate(&world().host_memory, bytes, memory);
  });
}

FAKE_CUDA_EXPORT int cuMemFreeHost(uint64_t memory) {
  return give_back("cuMemFreeHost", Needs::kContext, [&] {
    return release(&world().host_memory, memory, false, fake_cuda::kInvalidValue);
  });
}

FAKE_CUDA_EXPORT int cuMemHostRegister_v2(uint64_t memory, size_t bytes, unsigned flags) {
  return call("cuMemHostRegister", Needs::kContextUnsafeInCapture, [&] {
    if (world().options().refuse_registration != 0) return world().options().refuse_registration;
    if (bytes == 0 || (flags & 1) == 0 || (flags & ~9u) != 0) return fake_cuda::kInvalidValue;
    if (bytes > uint64_t{64} << 30) return fake_cuda::kOutOfMemory;
    const std::lock_guard lock(world().memory_mutex);
    if (World::touches(world().host_memory, memory, bytes)) return fake_cuda::kAlreadyRegistered;
    world().host_memory[memory] = {bytes, world().current(), true, (flags & 8) != 0};
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuMemHostUnregister(uint64_t memory) {
  return give_back("cuMemHostUnregister", Needs::kContext, [&] {
    return release(&world().host_memory, memory, true, fake_cuda::kNotRegistered);
  });
}

FAKE_CUDA_EXPORT int cuPointerGetAttributes(unsigned count, int* attributes, void** values,
                                            uint64_t address) {
  return call("cuPointerGetAttributes", Needs::kInit, [&] {
    const Memory* const device = World::find(world().device_memory, address, 1);
    const Memory* const host = World::find(world().host_memory, address, 1);
    const Memory* const memory = device != nullptr ? device : host;
    for (unsigned i = 0; i < count; ++i) {
      int value = 0;
      if (attributes[i] == 2 && memory != nullptr) value = memory == device ? 2 : 1;
      if (attributes[i] == 9) value = memory == nullptr ? -2 : 0;
      if (attributes[i] == 9 && memory != nullptr && world().contexts.contains(memory->context)) {
        value = world().contexts[memory->context].device;
      }
      *static_cast<int*>(values[i]) = value;
    }
    return fake_cuda::kOk;
  });
}
