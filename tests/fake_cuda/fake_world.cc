// Streams as threads, events, and the account of misuse. See fake_world.h.
#include "fake_world.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace fake_cuda {
namespace {

constexpr int kCaptureRelaxed = 2;

bool loses(int result) { return result == kIllegalAddress || result == kLaunchFailed; }

uint64_t variable(const std::string& name, uint64_t otherwise) {
  const char* text = std::getenv(name.c_str());
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace

std::vector<Handle>& context_stack() {
  thread_local std::vector<Handle> stack;
  return stack;
}

int& capture_mode() {
  thread_local int mode = 0;
  return mode;
}

uint64_t thread_number() {
  static std::atomic<uint64_t> next = 0;
  thread_local const uint64_t number = ++next;
  return number;
}

World& World::get() {
  static World* const world = new World;  // never deleted: threads may outlive main
  return *world;
}

World::World() {
  options_.seed = variable("FAKE_CUDA_SEED", options_.seed);
  options_.delay_us_max =
      static_cast<uint32_t>(variable("FAKE_CUDA_DELAY_US", options_.delay_us_max));
  options_.devices = static_cast<int>(variable("FAKE_CUDA_DEVICES", 1));
  options_.refuse_registration = static_cast<int>(variable("FAKE_CUDA_REFUSE_REGISTRATION", 0));
  from_environment();
}

void World::from_environment() {
  const auto number = [](const std::string& name, int otherwise) {
    return static_cast<int>(variable("FAKE_CUDA_" + name, static_cast<uint64_t>(otherwise)));
  };
  rules.memory_waits = number("MEMORY_WAITS", 0);
  rules.pageable_blocks = number("PAGEABLE_BLOCKS", 0);
  rules.any_address = number("ANY_ADDRESS", 0);
  attributes.clear();
  for (int device = 0; device < options_.devices; ++device) {
    for (const int one : {kHostPointers, kRegistration, kHostPageTables, kReadOnlyRegistration}) {
      attributes[{device, one}] =
          number("ATTRIBUTE_" + std::to_string(one), one != kHostPageTables);
    }
  }
}

int World::attribute(int device, int number) const {
  const auto found = attributes.find({device, number});
  return found != attributes.end() ? found->second : 0;
}

int World::injected(const char* name) {
  if (fail_in_ == 0 || (!fail_name_.empty() && fail_name_ != name)) return kOk;
  return --fail_in_ == 0 ? fail_result_ : kOk;
}

int World::call(const char* name, Needs needs, When when, const std::function<int(Lock&)>& body) {
  Lock lock(mutex_);
  ++calls_[name];
  ++calls_of_all_;
  const int failure = injected(name);
  if (loses(failure) && current() != 0) lose(current(), failure);
  if (failure != kOk && when == When::kBefore) return failure;
  if (needs != Needs::kNothing && !initialised) return kNotInitialized;
  if (needs == Needs::kContext || needs == Needs::kContextUnsafeInCapture) {
    if (current() == 0) return misuse(std::string(name) + " without a context", kInvalidContext);
    const int lost = contexts[current()].lost;
    if (lost != kOk && when == When::kBefore) return lost;
    if (needs == Needs::kContextUnsafeInCapture && capturing() &&
        capture_mode() != kCaptureRelaxed) {
      ++broken_captures;
      return kCaptureUnsupported;
    }
  }
  int result = body(lock);
  if (needs >= Needs::kContext && current() != 0 && contexts[current()].lost != kOk) {
    result = contexts[current()].lost;
  }
  return failure != kOk ? failure : result;
}

void World::lose(Handle context, int result) {
  if (contexts.contains(context)) contexts[context].lost = result;
}

int World::misuse(const std::string& what, int result) {
  if (misuses_++ == 0) first_misuse_ = what;
  return result;
}

Handle World::current() const {
  const auto& stack = context_stack();
  return !stack.empty() && contexts.contains(stack.back()) ? stack.back() : 0;
}

Handle World::retain(int device) {
  Handle& handle = primary[device];
  if (handle == 0) {
    handle = new_handle();
    contexts[handle].device = device;
  }
  ++contexts[handle].retained;
  return handle;
}

int World::release(int device) {
  const auto found = primary.find(device);
  if (found == primary.end()) return misuse("a context is released too often", kInvalidContext);
  const Handle handle = found->second;
  if (--contexts[handle].retained > 0) return kOk;
  for (const auto& [name, stream] : streams_) {
    if (stream->context == handle && stream->kind.counted) {
      misuse("a stream outlives its context", 0);
    }
  }
  for (const auto& [name, event] : events) {
    if (event.context == handle) misuse("an event outlives its context", 0);
  }
  contexts.erase(handle);
  primary.erase(found);
  return kOk;
}

bool World::stands(const Stream& stream) const {
  if (stream.ops.empty()) return true;
  const Op& op = stream.ops.front();
  const bool waits = op.kind == Op::Kind::kWait && options_.ignore_waits == 0;
  return (waits || op.kind == Op::Kind::kGate) && !op.record->done;
}

bool World::is_lost(const Stream& stream) const {
  const auto found = contexts.find(stream.context);
  return found != contexts.end() && found->second.lost != kOk;
}

Handle World::make_stream(Handle context, const Stream::Kind& kind) {
  const Handle handle = new_handle();
  auto stream = std::make_unique<Stream>();
  stream->kind = kind;
  stream->context = context;
  stream->random.seed(options_.seed * 1000003 + ++streams_made_);
  Stream* const made = stream.get();
  streams_[handle] = std::move(stream);
  made->thread = std::thread([this, made] { run(made); });
  return handle;
}

void World::run(Stream* stream) {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stream->ending || !stream->ops.empty(); });
    if (stream->ops.empty()) return;
    const uint64_t most = options_.delay_us_max;
    const uint64_t delay_us = most > 0 ? stream->random() % (most + 1) : 0;
    Op& op = stream->ops.front();  // stays where it is while others are added
    lock.unlock();
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    lock.lock();
    if (op.kind == Op::Kind::kWork && !is_lost(*stream)) {
      lock.unlock();
      op.work();
      lock.lock();
    }
    if (op.kind == Op::Kind::kRecord) op.record->done = true;
    if (op.kind == Op::Kind::kGate || (op.kind == Op::Kind::kWait && options_.ignore_waits == 0)) {
      changed_.wait(lock, [&] { return op.record->done; });
    }
    stream->ops.pop_front();
    changed_.notify_all();
  }
}

void World::enqueue(Stream* stream, Op op) {
  stream->ops.push_back(std::move(op));
  changed_.notify_all();
}

Handle World::gate(Stream* stream) {
  const Handle handle = new_handle();
  gates_[handle] = std::make_shared<Record>();
  enqueue(stream, {Op::Kind::kGate, {}, gates_[handle]});
  return handle;
}

void World::open(uint64_t gate) {
  Lock lock(mutex_);
  gates_.at(gate)->done = true;
  changed_.notify_all();
}

void World::settle() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] {
    return std::ranges::all_of(all_streams(), [&](const Stream* one) { return stands(*one); });
  });
}

void World::finish() {
  Lock lock(mutex_);
  for (const auto& [handle, record] : gates_) record->done = true;
  changed_.notify_all();
  changed_.wait(lock, [&] {
    return std::ranges::all_of(all_streams(), [](const Stream* one) { return one->ops.empty(); });
  });
}

void World::wait_through(Lock& lock, Stream* stream) {
  const auto record = std::make_shared<Record>();
  enqueue(stream, {Op::Kind::kRecord, {}, record});
  wait_for(lock, [&] { return record->done; });
}

void World::wait_through_all(Lock& lock) {
  std::vector<std::shared_ptr<Record>> records;
  for (const auto& [handle, stream] : streams_) {
    records.push_back(std::make_shared<Record>());
    enqueue(stream.get(), {Op::Kind::kRecord, {}, records.back()});
  }
  wait_for(lock, [&] {
    return std::ranges::all_of(records, [](const auto& one) { return one->done; }) &&
           std::ranges::all_of(ended_, [](const auto& one) { return one->ops.empty(); });
  });
}

std::vector<Stream*> World::all_streams() const {
  std::vector<Stream*> all;
  for (const auto& [handle, stream] : streams_) all.push_back(stream.get());
  for (const auto& stream : ended_) all.push_back(stream.get());
  return all;
}

Stream* World::stream_of(Handle handle) {
  if (handle <= 2) {
    Context& context = contexts[current()];
    Handle& own = handle == 2 ? context.per_thread[thread_number()] : context.legacy;
    if (own == 0) own = make_stream(current(), {.blocking = handle == 2});
    handle = own;
  }
  const auto found = streams_.find(handle);
  if (found == streams_.end()) {
    misuse("a stream that is not there", 0);
    return nullptr;
  }
  if (found->second->context != current()) {
    misuse("a stream of a context that is not current", 0);
    return nullptr;
  }
  return found->second.get();
}

Event* World::event_of(Handle handle) {
  const auto found = events.find(handle);
  if (found != events.end()) return &found->second;
  misuse("an event that is not there", 0);
  return nullptr;
}

void World::end_stream(Handle handle) {
  const auto found = streams_.find(handle);
  found->second->ending = true;
  ended_.push_back(std::move(found->second));
  streams_.erase(found);
  changed_.notify_all();
}

bool World::capturing() const {
  for (const auto& [handle, stream] : streams_) {
    if (stream->capturing) return true;
  }
  return false;
}

bool World::captures_blocking() const {
  for (const auto& [handle, stream] : streams_) {
    const bool here = stream->context == current();
    if (here && stream->capturing && stream->kind.blocking) return true;
  }
  return false;
}

const Memory* World::find(const Memories& memories, uint64_t address, uint64_t bytes) {
  auto after = memories.upper_bound(address);
  if (after == memories.begin()) return nullptr;
  const auto& [begin, memory] = *--after;
  const bool all = address - begin <= memory.bytes && bytes <= memory.bytes - (address - begin);
  return all && address - begin < memory.bytes ? &memory : nullptr;
}

bool World::touches(const Memories& memories, uint64_t address, uint64_t bytes) {
  auto at = memories.lower_bound(address + bytes);
  if (at == memories.begin()) return false;
  --at;
  return at->first + at->second.bytes > address;
}

void World::copy(const Copy& copy) {
  std::shared_lock in_use(memory_mutex);
  const auto gone = [&](const Side& side) {
    if (side.in == nullptr) return false;
    const Memory* const memory = find(*side.in, side.address, copy.bytes);
    return memory == nullptr || memory->number != side.number;
  };
  if (gone(copy.target) || gone(copy.source)) {
    in_use.unlock();
    Lock lock(mutex_);
    misuse("memory of a copy went before it took place", 0);
    return;
  }
  // In two parts: who looks too early may find either.
  std::byte* const target = copy.target.host;
  const std::byte* const source = copy.source.host;
  const uint64_t half = copy.bytes / 2;
  std::memcpy(target, source, half);
  std::this_thread::yield();
  std::memcpy(target + half, source + half, copy.bytes - half);
  ++copies;
}

}  // namespace fake_cuda
