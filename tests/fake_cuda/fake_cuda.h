// A libcuda of our own for tests on machines without a GPU: what a test may ask of it and tell it.
//
// The library has the calls of the driver API that csrc/cuda_driver.cc uses. A stream is a thread
// that does what it is given, in order and late: before each thing it waits a random while, so
// streams overtake one another. Events, contexts per thread, pinned and registered memory and CUDA
// graphs' capture are kept account of as CUDA does it, and what CUDA forbids or leaves undefined is
// a misuse: counted, with its reason, and returned as an error where there is a caller.
//
// It is no kinder than a driver may be. Device memory has addresses at which the host finds
// nothing: whoever reads or writes there ends by SIGSEGV (`fake_cuda_memory` says where tests find
// its bytes). Copies are late, so one that is queued when its memory goes is a misuse, also if
// other memory has come to that address. In a context that is lost nothing more happens. What may
// differ between drivers is an option, a rule, or an attribute; where a rule stands in CUDA's
// documents, or who has met it, is said where it is kept.
//
// What is left out: the legacy stream does not wait for the blocking streams, nor they for it.
//
// These functions are C, so that Python's ctypes may call them too. Threads: any.
#pragma once

#include <cstdint>

#define FAKE_CUDA_EXPORT extern "C" __attribute__((visibility("default")))

struct FakeCudaOptions {
  uint64_t seed = 1;
  uint32_t delay_us_max = 50;  // before each thing that a stream does; 0: only yields
  int32_t devices = 1;
  int32_t refuse_registration = 0;  // the result of cuMemHostRegister; 0: it works
  int32_t pop_fails_late = 0;       // cuCtxPopCurrent that is to fail does its own first
  int32_t copies_singly = 0;        // cuMemcpyBatchAsync is not supported
  int32_t ignore_waits = 0;         // a mutation: streams do not wait for events
};

// What drivers may do; by itself this one does nothing of it.
struct FakeCudaRules {
  // What allocates memory, registers it or gives it back first waits for all that any stream has
  // been given by then.
  int32_t memory_waits = 0;
  int32_t pageable_blocks = 0;  // copies out of and into pageable memory return when they are done
  int32_t any_address = 0;      // memory that was never allocated is the device's: for simulations
};

// What lives, of this process; `depth` and `capture_mode` are of the calling thread.
struct FakeCudaCounters {
  int64_t contexts;
  int64_t streams;  // that were made and not destroyed
  int64_t events;
  int64_t device_allocations;
  int64_t host_allocations;
  int64_t registrations;
  int64_t copies;               // that took place
  int64_t unregistered_copies;  // of host memory that was neither pinned nor registered
  int64_t misuses;
  int64_t broken_captures;  // calls that would have broken the capture of a CUDA graph
  int64_t depth;            // of the stack of contexts
  int64_t capture_mode;
  int64_t highest_priority;  // streams among `streams` made with it, not waiting for legacy
};

// Forgets everything, once all streams have done what they were given, and takes `options`. The
// first options are from the environment: FAKE_CUDA_SEED, FAKE_CUDA_DELAY_US, FAKE_CUDA_DEVICES,
// FAKE_CUDA_REFUSE_REGISTRATION. So are, first and after each reset, the rules
// (FAKE_CUDA_MEMORY_WAITS, FAKE_CUDA_PAGEABLE_BLOCKS, FAKE_CUDA_ANY_ADDRESS) and the attributes
// (FAKE_CUDA_ATTRIBUTE_91 and so on).
FAKE_CUDA_EXPORT void fake_cuda_reset(const FakeCudaOptions* options);
FAKE_CUDA_EXPORT void fake_cuda_rules(const FakeCudaRules* rules);
// What cuDeviceGetAttribute says of a device: 91, 99 and 113 are 1 by themselves, 100 is 0.
FAKE_CUDA_EXPORT void fake_cuda_attribute(int32_t device, int32_t attribute, int32_t value);
FAKE_CUDA_EXPORT void fake_cuda_counters(FakeCudaCounters* counters);
// The first misuse in words, or "". Stays valid until the next reset.
FAKE_CUDA_EXPORT const char* fake_cuda_misuse();

// The `nth` call from now on (from 1) of the function, or of any if `name` is null, returns
// `result`. One that makes or does something then does nothing; one that gives something back does
// so first. A result that loses a context loses the current one with it.
FAKE_CUDA_EXPORT void fake_cuda_fail(const char* name, uint64_t nth, int32_t result);
// 1 if a failure that was asked for has not happened yet; it is taken back.
FAKE_CUDA_EXPORT int32_t fake_cuda_unfail();
// How often a function was called since the reset; null: all.
FAKE_CUDA_EXPORT uint64_t fake_cuda_calls(const char* name);

// A stream as torch would have one: it is made in device 0's primary context, or another's, waits
// for nothing that is not asked of it, and does not count among those of the counters.
FAKE_CUDA_EXPORT uint64_t fake_cuda_stream(int32_t device);
// The same, but a blocking one, as who calls CUDA by hand may have it: while it captures, the
// legacy stream cannot be used.
FAKE_CUDA_EXPORT uint64_t fake_cuda_blocking_stream(int32_t device);
// Where the host finds the bytes of device memory, which may be named anywhere within.
FAKE_CUDA_EXPORT void* fake_cuda_memory(uint64_t device);
// Gives the stream a function to run, as if it were a kernel. 0, 1 and 2 are those of the context
// that is current.
FAKE_CUDA_EXPORT void fake_cuda_enqueue(uint64_t stream, void (*run)(void*), void* argument);
// Gives the stream a gate, at which it waits until it is opened.
FAKE_CUDA_EXPORT uint64_t fake_cuda_gate(uint64_t stream);
FAKE_CUDA_EXPORT void fake_cuda_open(uint64_t gate);
// Waits until every stream is through, or waits for an event or at a gate: until nothing more
// happens by itself.
FAKE_CUDA_EXPORT void fake_cuda_settle();
// Opens all gates and waits until every stream is through: what a test has left queued is found now
// if it does not find its memory. For the end of each test, before the account is looked at.
FAKE_CUDA_EXPORT void fake_cuda_finish();
// The stream captures a CUDA graph from now on, or no longer.
FAKE_CUDA_EXPORT void fake_cuda_capture(uint64_t stream, int32_t on);
// The thread has a device's primary context current, as after torch.cuda.set_device.
FAKE_CUDA_EXPORT void fake_cuda_set_device(int32_t device);
