// What a test tells the fake driver, and asks of it. See fake_cuda.h.
#include <utility>

#include "fake_pages.h"
#include "fake_world.h"

namespace fake_cuda {

void World::reset(const FakeCudaOptions& options) {
  Lock lock(mutex_);
  for (const auto& [handle, record] : gates_) record->done = true;
  for (Stream* stream : all_streams()) stream->ending = true;
  changed_.notify_all();
  lock.unlock();
  for (Stream* stream : all_streams()) stream->thread.join();
  lock.lock();
  streams_.clear();
  ended_.clear();
  gates_.clear();
  events.clear();
  contexts.clear();
  primary.clear();
  context_stack().clear();
  capture_mode() = 0;
  {
    const std::lock_guard memory(memory_mutex);
    for (const auto& [address, memory_of] : device_memory) free_memory(memory_of);
    for (const auto& [address, memory_of] : host_memory) {
      if (!memory_of.registered) free_memory(memory_of);
    }
    device_memory.clear();
    host_memory.clear();
  }
  calls_.clear();
  first_misuse_.clear();
  calls_of_all_ = fail_in_ = streams_made_ = 0;
  misuses_ = broken_captures = unregistered_copies = 0;
  copies = 0;
  initialised = false;
  torch_devices_.clear();
  options_ = options;
  from_environment();
}

void World::counters(FakeCudaCounters* counters) {
  Lock lock(mutex_);
  *counters = {};
  counters->contexts = static_cast<int64_t>(contexts.size());
  for (const auto& [handle, stream] : streams_) {
    const Stream::Kind& kind = stream->kind;
    counters->streams += kind.counted ? 1 : 0;
    counters->highest_priority += kind.counted && kind.highest ? 1 : 0;
  }
  counters->events = static_cast<int64_t>(events.size());
  const std::shared_lock memory(memory_mutex);
  counters->device_allocations = static_cast<int64_t>(device_memory.size());
  for (const auto& [address, memory_of] : host_memory) {
    (memory_of.registered ? counters->registrations : counters->host_allocations) += 1;
  }
  counters->copies = copies;
  counters->unregistered_copies = unregistered_copies;
  counters->misuses = misuses_;
  counters->broken_captures = broken_captures;
  counters->depth = static_cast<int64_t>(context_stack().size());
  counters->capture_mode = capture_mode();
}

void World::fail(const char* name, uint64_t nth, int result) {
  Lock lock(mutex_);
  fail_name_ = name != nullptr ? name : "";
  fail_in_ = nth;
  fail_result_ = result;
}

bool World::unfail() {
  Lock lock(mutex_);
  return std::exchange(fail_in_, 0) != 0;
}

Handle World::torch_context(int device) {
  if (torch_devices_.insert(device).second) return retain(device);
  return primary[device];
}

uint64_t World::calls(const char* name) {
  Lock lock(mutex_);
  return name != nullptr ? calls_[name] : calls_of_all_;
}

const char* World::misuse_words() {
  Lock lock(mutex_);
  return first_misuse_.c_str();
}

}  // namespace fake_cuda

using fake_cuda::World;

void fake_cuda_reset(const FakeCudaOptions* options) { World::get().reset(*options); }
void fake_cuda_counters(FakeCudaCounters* counters) { World::get().counters(counters); }
const char* fake_cuda_misuse() { return World::get().misuse_words(); }
void fake_cuda_fail(const char* name, uint64_t nth, int32_t result) {
  World::get().fail(name, nth, result);
}
int32_t fake_cuda_unfail() { return World::get().unfail() ? 1 : 0; }
uint64_t fake_cuda_calls(const char* name) { return World::get().calls(name); }
void fake_cuda_open(uint64_t gate) { World::get().open(gate); }
void fake_cuda_settle() { World::get().settle(); }
void fake_cuda_finish() { World::get().finish(); }

void fake_cuda_rules(const FakeCudaRules* rules) {
  World& world = World::get();
  const World::Lock lock = world.locked();
  world.rules = *rules;
}

void fake_cuda_attribute(int32_t device, int32_t attribute, int32_t value) {
  World& world = World::get();
  const World::Lock lock = world.locked();
  world.attributes[{device, attribute}] = value;
}

uint64_t fake_cuda_stream(int32_t device) {
  World& world = World::get();
  const World::Lock lock = world.locked();
  return world.make_stream(world.torch_context(device), {});
}

uint64_t fake_cuda_blocking_stream(int32_t device) {
  World& world = World::get();
  const World::Lock lock = world.locked();
  return world.make_stream(world.torch_context(device), {.blocking = true});
}

void* fake_cuda_memory(uint64_t device) {
  World& world = World::get();
  const std::shared_lock lock(world.memory_mutex);
  const fake_cuda::Memory* const memory = World::find(world.device_memory, device, 1);
  return memory != nullptr ? memory->host + (device - memory->address) : nullptr;
}

void fake_cuda_set_device(int32_t device) {
  World& world = World::get();
  const World::Lock lock = world.locked();
  fake_cuda::context_stack().assign(1, world.torch_context(device));
}

void fake_cuda_enqueue(uint64_t stream, void (*run)(void*), void* argument) {
  World& world = World::get();
  const World::Lock lock = world.locked();
  auto work = [run, argument] { run(argument); };
  world.enqueue(&world.any_stream(stream), {fake_cuda::Op::Kind::kWork, work, nullptr});
}

uint64_t fake_cuda_gate(uint64_t stream) {
  World& world = World::get();
  const World::Lock lock = world.locked();
  return world.gate(&world.any_stream(stream));
}

void fake_cuda_capture(uint64_t stream, int32_t on) {
  World& world = World::get();
  const World::Lock lock = world.locked();
  world.any_stream(stream).capturing = on != 0;
}
