// What the fake driver keeps account of. One mutex guards all of it but the maps of memory, which
// copies look into while they run.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda.h"

namespace fake_cuda {

using Handle = uint64_t;

inline constexpr int kOk = 0;
inline constexpr int kInvalidValue = 1;
inline constexpr int kOutOfMemory = 2;
inline constexpr int kNotInitialized = 3;
inline constexpr int kNoDevice = 100;
inline constexpr int kInvalidDevice = 101;
inline constexpr int kInvalidContext = 201;
inline constexpr int kInvalidHandle = 400;
inline constexpr int kNotReady = 600;
inline constexpr int kIllegalAddress = 700;
inline constexpr int kAlreadyRegistered = 712;
inline constexpr int kNotRegistered = 713;
inline constexpr int kLaunchFailed = 719;
inline constexpr int kNotSupported = 801;
inline constexpr int kCaptureUnsupported = 900;
inline constexpr int kCaptureImplicit = 906;

// CUdevice_attribute, from cuda.h.
inline constexpr int kHostPointers =
    91;  // host addresses of registered memory are the device's too
inline constexpr int kRegistration = 99;           // host memory can be registered
inline constexpr int kHostPageTables = 100;        // the device goes by the host's page tables
inline constexpr int kReadOnlyRegistration = 113;  // memory that is only read can be registered

// One recording of an event: done once the stream gets there.
struct Record {
  bool done = false;
};

struct Op {
  enum class Kind { kWork, kRecord, kWait, kGate };
  Kind kind;
  std::function<void()> work;      // kWork
  std::shared_ptr<Record> record;  // kRecord, kWait, kGate: opened when done
};

struct Stream {
  struct Kind {
    bool counted = false;   // made by cuStreamCreateWithPriority
    bool highest = false;   // with the highest priority, and not blocking
    bool blocking = false;  // the legacy stream would wait for it
  };
  Kind kind;
  Handle context = 0;
  bool capturing = false;
  bool ending = false;  // ends when it is through
  std::deque<Op> ops;   // the first is being done
  std::mt19937_64 random;
  std::thread thread;
};

struct Event {
  Handle context = 0;
  std::shared_ptr<Record> record;  // null: never recorded
};

struct Context {
  int device = 0;
  int64_t retained = 0;
  int lost = 0;                           // the error that lost it
  Handle legacy = 0;                      // streams 0 and 1, made when first used
  std::map<uint64_t, Handle> per_thread;  // stream 2
};

struct Memory {
  uint64_t address = 0;
  uint64_t bytes = 0;
  Handle context = 0;
  bool registered = false;  // else it is an allocation
  bool read_only = false;
  std::byte* host = nullptr;  // where the host finds it
  uint64_t number = 0;        // of no other memory, also at the same address
};
using Memories = std::map<uint64_t, Memory>;  // by address

// One side of a copy. `in` has to have it still when the copy takes place; null: pageable memory.
struct Side {
  std::byte* host = nullptr;
  const Memories* in = nullptr;
  uint64_t address = 0;
  uint64_t number = 0;
  bool on_host = false;
  bool registered = false;
};

struct Copy {
  Side target = {};
  Side source = {};
  uint64_t bytes = 0;
};

// What a call needs, and how it fails.
enum class Needs { kNothing, kInit, kContext, kContextUnsafeInCapture };
enum class When {
  kBefore,
  kAfter
};  // an error that was asked for comes before or after it is done

class World {
 public:
  static World& get();

  using Lock = std::unique_lock<std::mutex>;
  // Runs `body` as the call `name`, with the mutex held.
  int call(const char* name, Needs needs, When when, const std::function<int(Lock&)>& body);

  void reset(const FakeCudaOptions& options);
  void counters(FakeCudaCounters* counters);
  void fail(const char* name, uint64_t nth, int result);
  bool unfail();
  uint64_t calls(const char* name);
  const char* misuse_words();
  void open(uint64_t gate);
  void settle();
  void finish();

  // All below: with the mutex held.
  Lock locked() { return Lock(mutex_); }
  int misuse(const std::string& what, int result);
  const FakeCudaOptions& options() const { return options_; }
  FakeCudaRules rules;
  std::map<std::pair<int, int>, int> attributes;  // that were set; by device and number
  int attribute(int device, int number) const;
  bool initialised = false;
  std::map<int, Handle> primary;  // by device
  std::map<Handle, Context> contexts;
  std::map<Handle, Event> events;

  Handle current() const;
  Handle new_handle() { return next_handle_ += 16; }
  Handle retain(int device);
  int release(int device);
  // Nothing in it goes on from now.
  void lose(Handle context, int result);
  Handle make_stream(Handle context, const Stream::Kind& kind);
  // What a test names: of any context.
  Stream& any_stream(Handle handle) {
    return handle > 2 ? *streams_.at(handle) : *stream_of(handle);
  }
  Handle torch_context(int device);  // torch keeps the primary contexts that it uses
  // The stream of a handle in the current context; null is a misuse that has been counted.
  Stream* stream_of(Handle handle);
  Event* event_of(Handle handle);
  void end_stream(Handle handle);
  void enqueue(Stream* stream, Op op);
  Handle gate(Stream* stream);
  void wait_for(Lock& lock, const std::function<bool()>& predicate) {
    changed_.wait(lock, predicate);
  }
  // Until the stream, or every stream, has done what it has been given by now.
  void wait_through(Lock& lock, Stream* stream);
  void wait_through_all(Lock& lock);
  bool capturing() const;
  // Is a stream captured that keeps the current context's legacy stream from being used?
  bool captures_blocking() const;

  // Memory has a lock of its own, taken after the mutex.
  std::shared_mutex memory_mutex;
  Memories device_memory;
  Memories host_memory;
  // The memory that has all of the range; null: none has.
  static const Memory* find(const Memories& memories, uint64_t address, uint64_t bytes);
  static bool touches(const Memories& memories, uint64_t address, uint64_t bytes);
  uint64_t new_memory_number() { return ++memories_made_; }
  // On a stream's thread, without the mutex.
  void copy(const Copy& copy);
  std::atomic<int64_t> copies = 0;
  int64_t unregistered_copies = 0;
  int64_t broken_captures = 0;

 private:
  World();
  void run(Stream* stream);
  bool stands(const Stream& stream) const;  // nothing happens here by itself
  bool is_lost(const Stream& stream) const;
  std::vector<Stream*> all_streams() const;
  int injected(const char* name);
  void from_environment();

  std::mutex mutex_;
  std::condition_variable changed_;
  FakeCudaOptions options_;
  std::map<Handle, std::unique_ptr<Stream>> streams_;
  std::vector<std::unique_ptr<Stream>> ended_;
  std::map<Handle, std::shared_ptr<Record>> gates_;
  std::map<std::string, uint64_t> calls_;
  uint64_t calls_of_all_ = 0;
  std::string fail_name_;  // "": any
  uint64_t fail_in_ = 0;   // 0: none is asked for
  int fail_result_ = 0;
  int64_t misuses_ = 0;
  std::string first_misuse_;
  Handle next_handle_ = 0x10000;
  uint64_t streams_made_ = 0;
  uint64_t memories_made_ = 0;
  std::set<int> torch_devices_;
};

// The calling thread's.
std::vector<Handle>& context_stack();
int& capture_mode();
uint64_t thread_number();

}  // namespace fake_cuda
