// The fake driver's calls on memory, and copies one by one. See fake_cuda.h.
#include "fake_copies.h"
#include "fake_pages.h"

namespace {

using fake_cuda::call;
using fake_cuda::Copy;
using fake_cuda::copy_late;
using fake_cuda::device_side;
using fake_cuda::Handle;
using fake_cuda::host_side;
using fake_cuda::Mapped;
using fake_cuda::Memories;
using fake_cuda::Memory;
using fake_cuda::Needs;
using fake_cuda::Side;
using fake_cuda::Stream;
using fake_cuda::When;
using fake_cuda::with_memory;
using fake_cuda::with_stream;
using fake_cuda::world;
using fake_cuda::World;
using Lock = World::Lock;

constexpr unsigned kPortable = 1;
constexpr unsigned kReadOnly = 8;

// A copy out of or into pageable memory may wait for the stream, and for its own end (CUDA's page
// on the synchronization behavior of its API; one to the host always did until CUDA 11).
int copy_and_wait(Stream* stream, const Copy& copy, Lock& lock) {
  const int result = copy_late(stream, copy);
  const Side& host = copy.target.on_host ? copy.target : copy.source;
  const bool pageable = host.on_host && host.in == nullptr;
  if (result == fake_cuda::kOk && pageable && world().rules.pageable_blocks != 0) {
    world().wait_through(lock, stream);
  }
  return result;
}

int allocate(Memories* memories, uint64_t bytes, uint64_t* address) {
  if (bytes == 0) return fake_cuda::kInvalidValue;
  Memory memory = fake_cuda::new_memory(bytes, memories == &world().device_memory);
  memory.context = world().current();
  memory.number = world().new_memory_number();
  *address = memory.address;
  const std::lock_guard lock(world().memory_mutex);
  (*memories)[*address] = memory;
  return fake_cuda::kOk;
}

int release(Memories* memories, uint64_t address, bool registered, int otherwise) {
  // Waits for copies that are taking place; those that have not begun find it gone.
  const std::lock_guard lock(world().memory_mutex);
  const auto found = memories->find(address);
  if (found == memories->end() || found->second.registered != registered) {
    return world().misuse("memory that is not there is given back", otherwise);
  }
  if (!registered) fake_cuda::free_memory(found->second);
  memories->erase(found);
  return fake_cuda::kOk;
}

// What cuda.h says of cuMemHostRegister and its flags. That memory which is not mapped, and memory
// that is mapped to be read, are an invalid value is what programs that tried it report.
int may_register(uint64_t address, uint64_t bytes, unsigned flags, bool* read_only) {
  const int device = world().contexts[world().current()].device;
  const auto can = [&](int attribute) { return world().attribute(device, attribute) != 0; };
  if (world().options().refuse_registration != 0) return world().options().refuse_registration;
  if (bytes == 0 || (flags & kPortable) == 0 || (flags & ~(kPortable | kReadOnly)) != 0) {
    return fake_cuda::kInvalidValue;
  }
  const bool asked_read_only = (flags & kReadOnly) != 0;
  if (!can(fake_cuda::kRegistration)) return fake_cuda::kNotSupported;
  if (asked_read_only && !can(fake_cuda::kReadOnlyRegistration)) return fake_cuda::kNotSupported;
  if (bytes > uint64_t{64} << 30) return fake_cuda::kOutOfMemory;
  if (World::touches(world().host_memory, address, bytes)) return fake_cuda::kAlreadyRegistered;
  const Mapped mapped = fake_cuda::how_mapped(address, bytes);
  if (mapped == Mapped::kNo) {
    return world().misuse("memory is registered that is not mapped", fake_cuda::kInvalidValue);
  }
  *read_only = asked_read_only || mapped == Mapped::kToRead;
  const bool may = mapped == Mapped::kToWrite || asked_read_only || can(fake_cuda::kHostPageTables);
  return may ? fake_cuda::kOk : fake_cuda::kInvalidValue;
}

}  // namespace

FAKE_CUDA_EXPORT int cuMemcpyDtoHAsync_v2(uint64_t target, uint64_t source, size_t bytes,
                                          Handle handle) {
  return with_stream("cuMemcpyDtoHAsync", handle, [&](Stream* stream, Lock& lock) {
    Copy copy = {.bytes = bytes};
    int result = host_side(target, bytes, true, &copy.target);
    if (result == fake_cuda::kOk) result = device_side(source, bytes, &copy.source);
    return result == fake_cuda::kOk ? copy_and_wait(stream, copy, lock) : result;
  });
}

FAKE_CUDA_EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes,
                                          Handle handle) {
  return with_stream("cuMemcpyHtoDAsync", handle, [&](Stream* stream, Lock& lock) {
    Copy copy = {.bytes = bytes};
    int result = host_side(source, bytes, false, &copy.source);
    if (result == fake_cuda::kOk) result = device_side(target, bytes, &copy.target);
    return result == fake_cuda::kOk ? copy_and_wait(stream, copy, lock) : result;
  });
}

FAKE_CUDA_EXPORT int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes,
                                          Handle handle) {
  return with_stream("cuMemcpyDtoDAsync", handle, [&](Stream* stream, Lock&) {
    Copy copy = {.bytes = bytes};
    int result = device_side(source, bytes, &copy.source);
    if (result == fake_cuda::kOk) result = device_side(target, bytes, &copy.target);
    return result == fake_cuda::kOk ? copy_late(stream, copy) : result;
  });
}

FAKE_CUDA_EXPORT int cuMemAlloc_v2(uint64_t* memory, size_t bytes) {
  return with_memory("cuMemAlloc", Needs::kContextUnsafeInCapture, When::kBefore,
                     [&] { return allocate(&world().device_memory, bytes, memory); });
}

FAKE_CUDA_EXPORT int cuMemFree_v2(uint64_t memory) {
  return with_memory("cuMemFree", Needs::kContext, When::kAfter, [&] {
    return release(&world().device_memory, memory, false, fake_cuda::kInvalidValue);
  });
}

FAKE_CUDA_EXPORT int cuMemHostAlloc(uint64_t* memory, size_t bytes, unsigned flags) {
  return with_memory("cuMemHostAlloc", Needs::kContextUnsafeInCapture, When::kBefore, [&] {
    if (flags != kPortable) world().misuse("pinned memory of one context only", fake_cuda::kOk);
    return allocate(&world().host_memory, bytes, memory);
  });
}

FAKE_CUDA_EXPORT int cuMemFreeHost(uint64_t memory) {
  return with_memory("cuMemFreeHost", Needs::kContext, When::kAfter, [&] {
    return release(&world().host_memory, memory, false, fake_cuda::kInvalidValue);
  });
}

FAKE_CUDA_EXPORT int cuMemHostRegister_v2(uint64_t address, size_t bytes, unsigned flags) {
  return with_memory("cuMemHostRegister", Needs::kContextUnsafeInCapture, When::kBefore, [&] {
    Memory memory = {.address = address, .bytes = bytes, .registered = true};
    const int refused = may_register(address, bytes, flags, &memory.read_only);
    if (refused != fake_cuda::kOk) return refused;
    memory.context = world().current();
    memory.host = reinterpret_cast<std::byte*>(address);
    memory.number = world().new_memory_number();
    const std::lock_guard lock(world().memory_mutex);
    world().host_memory[address] = memory;
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuMemHostUnregister(uint64_t memory) {
  return with_memory("cuMemHostUnregister", Needs::kContext, When::kAfter, [&] {
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
