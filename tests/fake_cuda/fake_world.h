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
inline constexpr int kNotSupported = 801;
inline constexpr int kNotRegistered = 713;
inline constexpr int kLaunchFailed = 719;
inline constexpr int kCaptureUnsupported = 900;

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
  Handle context = 0;
  bool counted = false;  // made by cuStreamCreateWithPriority
  bool highest = false;  // with the highest priority, and not blocking
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
  uint64_t bytes = 0;
  Handle context = 0;
  bool registered = false;  // else it is an allocation
  bool read_only = false;
};
using Memories = std::map<uint64_t, Memory>;  // by address

// Of each side, the map that must have it still when the copy takes place; null: pageable memory.
struct Copy {
  uint64_t target;
  uint64_t source;
  uint64_t bytes;
  const Memories* target_in;
  const Memories* source_in;
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

  // All below: with the mutex held.
  Lock locked() { return Lock(mutex_); }
  int misuse(const std::string& what, int result);
  const FakeCudaOptions& options() const { return options_; }
  bool initialised = false;
  std::map<int, Handle> primary;  // by device
  std::map<Handle, Context> contexts;
  std::map<Handle, Event> events;

  Handle current() const;
  Handle new_handle() { return next_handle_ += 16; }
  Handle retain(int device);
  int release(int device);
  Handle make_stream(Handle context, bool counted, bool highest);
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
  bool capturing() const;

  // Memory has a lock of its own, taken after the mutex.
  std::shared_mutex memory_mutex;
  Memories device_memory;
  Memories host_memory;
  // The memory that has all of the range; null: none has.
  static const Memory* find(const Memories& memories, uint64_t address, uint64_t bytes);
  static bool touches(const Memories& memories, uint64_t address, uint64_t bytes);
  // On a stream's thread, without the mutex.
  void copy(const Copy& copy);
  std::atomic<int64_t> copies = 0;
  int64_t unregistered_copies = 0;

 private:
  World();
  void run(Stream* stream);
  bool stands(const Stream& stream) const;  // nothing happens here by itself
  std::vector<Stream*> all_streams() const;
  void lose_current(int result);
  int injected(const char* name);

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
  int64_t broken_captures_ = 0;
  std::string first_misuse_;
  Handle next_handle_ = 0x10000;
  uint64_t streams_made_ = 0;
  std::set<int> torch_devices_;
};

// Memory for both kinds of allocation, on page borders as CUDA's is.
uint64_t new_memory(uint64_t bytes);
void free_memory(uint64_t address);

// The calling thread's.
std::vector<Handle>& context_stack();
int& capture_mode();
uint64_t thread_number();

}  // namespace fake_cuda
