// The fake driver's own rules. Goal: it is no kinder than a driver may be: what CUDA forbids is
// refused, or found by the end of a test; what may take its time takes it. Method: its calls, one
// by one, as a program would make them that does not know better.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>

#include "cuda_raw.h"

namespace lightckpt {
namespace {

constexpr int kInvalidValue = 1;
constexpr int kNoSuchOperation = 801;
constexpr int kIllegalAddress = 700;
constexpr int kCaptureImplicit = 906;
constexpr uint64_t kPageBytes = 4096;

using FakeDriver = RawCuda;

TEST_F(FakeDriver, device_memory_is_not_the_host_s) {
  restart();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  // The kernel reads it as this process would: what ends a process by SIGSEGV is EFAULT there.
  EXPECT_EQ(write(ends[1], reinterpret_cast<void*>(device), 1), -1);
  EXPECT_EQ(errno, EFAULT);
  EXPECT_EQ(write(ends[1], fake_cuda_memory(device), 1), 1);
  close(ends[0]);
  close(ends[1]);
  const auto* const bytes = static_cast<std::byte*>(fake_cuda_memory(device));
  EXPECT_EQ(fake_cuda_memory(device + 100), bytes + 100);
  EXPECT_EQ(fake_cuda_memory(pinned), nullptr);
}

TEST_F(FakeDriver, attributes_are_as_they_were_set) {
  restart({}, {.devices = 2});
  int devices[2] = {};
  int value = 7;
  ASSERT_EQ(cuDeviceGet(&devices[0], 0), 0);
  ASSERT_EQ(cuDeviceGet(&devices[1], 1), 0);
  for (const auto& [attribute, expected] : {std::pair(91, 1), {99, 1}, {100, 0}, {113, 1}}) {
    ASSERT_EQ(cuDeviceGetAttribute(&value, attribute, devices[1]), 0);
    EXPECT_EQ(value, expected) << attribute;
  }
  fake_cuda_attribute(1, 91, 0);
  ASSERT_EQ(cuDeviceGetAttribute(&value, 91, devices[1]), 0);
  EXPECT_EQ(value, 0);
  ASSERT_EQ(cuDeviceGetAttribute(&value, 91, devices[0]), 0);
  EXPECT_EQ(value, 1);
  EXPECT_EQ(cuDeviceGetAttribute(&value, 9999, devices[0]), kInvalidValue);
  EXPECT_EQ(cuDeviceGetAttribute(&value, 91, devices[1] + 1), kInvalidValue);
}

// Batches.

TEST_F(FakeDriver, a_batch_is_copied_on_a_stream_of_any_kind_but_one) {
  for (const uint64_t handle : {uint64_t{2}, uint64_t{3}, uint64_t{0}, uint64_t{1}}) {
    restart();
    RawBatch batch(pinned, device);
    const int result = batch.give(handle == 3 ? stream : handle);
    if (handle >= 2) {
      EXPECT_EQ(result, 0);
      EXPECT_EQ(batch.failed, SIZE_MAX);
      fake_cuda_settle();
      EXPECT_EQ(counted().copies, 2);
    } else {
      EXPECT_EQ(result, kInvalidValue);
      expect_misuse("legacy stream");
    }
  }
}

TEST_F(FakeDriver, a_batch_with_pageable_memory_is_refused) {
  for (const bool out : {true, false}) {
    restart();
    Buffer pageable(kRawBytes);
    RawBatch batch(out ? address_of(pageable.data()) : device,
                   out ? device : address_of(pageable.data()));
    EXPECT_EQ(batch.give(stream), kInvalidValue);
    EXPECT_EQ(batch.failed, 1u);
    expect_misuse("pageable");
    fake_cuda_settle();
    EXPECT_EQ(counted().copies, 0);
  }
}

TEST_F(FakeDriver, a_batch_s_attributes_are_looked_at) {
  const std::function<void(RawBatch*)> faults[] = {
      [](RawBatch* batch) { batch->attribute_count = 0; },
      [](RawBatch* batch) { batch->attribute_count = 3; },
      [](RawBatch* batch) { batch->indexes[0] = 1; },
      [](RawBatch* batch) { batch->indexes[1] = 1; },  // looked at though it is of no attributes
      [](RawBatch* batch) { batch->attribute_count = 2; },  // the second index is 0 as well
      [](RawBatch* batch) {
        batch->attribute_count = 2;
        batch->indexes[1] = 2;  // of no copy
      },
      [](RawBatch* batch) { batch->attributes[0][0] = 3; },  // read in any order
  };
  for (const auto& fault : faults) {
    restart();
    RawBatch batch(pinned, device);
    fault(&batch);
    EXPECT_EQ(batch.give(stream), kInvalidValue) << "fault " << &fault - faults;
    expect_misuse("a batch");
  }
  restart();
  RawBatch batch(pinned, device);
  batch.attribute_count = 2;
  batch.indexes[1] = 1;
  EXPECT_EQ(batch.give(stream), 0);
  EXPECT_EQ(counted().misuses, 0);
}

TEST_F(FakeDriver, only_a_driver_of_cuda_13_has_the_second_form) {
  void* const old = dlopen(FAKE_CUDA_12, RTLD_NOW | RTLD_LOCAL);
  void* const now = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(old, nullptr);
  ASSERT_NE(now, nullptr);
  EXPECT_NE(dlsym(old, "cuMemcpyBatchAsync"), nullptr);
  EXPECT_EQ(dlsym(old, "cuMemcpyBatchAsync_v2"), nullptr);
  EXPECT_NE(dlsym(now, "cuMemcpyBatchAsync_v2"), nullptr);
  EXPECT_EQ(dlsym(now, "cuMemcpyBatchAsync"), dlsym(old, "cuMemcpyBatchAsync"));
}

// Neither is the caller told, nor does anything happen after.
TEST_F(FakeDriver, where_attribute_91_is_0_a_batch_with_registered_memory_loses_the_context) {
  restart();
  fake_cuda_attribute(0, 91, 0);
  Buffer memory(kRawBytes);
  ASSERT_EQ(cuMemHostRegister_v2(address_of(memory.data()), kRawBytes, kPortable), 0);
  std::fill_n(static_cast<std::byte*>(fake_cuda_memory(device)), kRawBytes, std::byte{5});
  EXPECT_EQ(RawBatch(pinned, device).give(stream), 0) << "pinned memory is at one address";
  EXPECT_EQ(cuMemcpyDtoHAsync_v2(address_of(memory.data()), device, 100, stream), 0);
  ASSERT_EQ(cuStreamSynchronize(stream), 0);
  EXPECT_TRUE(all_are(std::span(memory).first(100), 5)) << "a single copy is translated";
  const uint64_t gate = fake_cuda_gate(stream);
  EXPECT_EQ(RawBatch(address_of(memory.data()), device).give(stream), 0);
  EXPECT_EQ(cuMemcpyHtoDAsync_v2(device, pinned, 100, stream), 0);
  const int64_t before = counted().copies;
  EXPECT_EQ(counted().misuses, 0);
  fake_cuda_open(gate);
  fake_cuda_settle();
  EXPECT_EQ(counted().copies, before);
  EXPECT_TRUE(all_are(std::span(memory).subspan(100), 0));
  EXPECT_EQ(cuStreamSynchronize(stream), kIllegalAddress);
  EXPECT_EQ(cuMemcpyDtoHAsync_v2(pinned, device, 100, stream), kIllegalAddress);
  EXPECT_EQ(cuMemHostUnregister(address_of(memory.data())), kIllegalAddress);
  expect_misuse("registered memory");
}

// Registration.

TEST_F(FakeDriver, what_is_not_mapped_is_not_registered) {
  enum class Hole { kNoPage, kNoAccess, kUnmapped, kBehindTheFile };
  for (const Hole hole : {Hole::kNoPage, Hole::kNoAccess, Hole::kUnmapped, Hole::kBehindTheFile}) {
    restart();
    const TempFolder folder(memory_folder());
    std::ofstream(folder.file("short")) << std::string(2 * kPageBytes, 'x');
    const int file = open(folder.file("short").c_str(), O_RDWR);
    const bool of_file = hole == Hole::kBehindTheFile;
    void* const memory =
        mmap(nullptr, 3 * kPageBytes, PROT_READ | PROT_WRITE,
             of_file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, of_file ? file : -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    void* const last = static_cast<std::byte*>(memory) + 2 * kPageBytes;
    if (hole == Hole::kNoAccess) {
      ASSERT_EQ(mprotect(last, kPageBytes, PROT_NONE), 0);
    }
    if (hole == Hole::kUnmapped) {
      ASSERT_EQ(munmap(last, kPageBytes), 0);
    }
    const uint64_t address = hole == Hole::kNoPage ? kPageBytes : address_of(memory);
    EXPECT_EQ(cuMemHostRegister_v2(address, 3 * kPageBytes, kPortable), kInvalidValue);
    expect_misuse("not mapped");
    EXPECT_EQ(counted().registrations, 0);
    if (hole != Hole::kNoPage) {
      EXPECT_EQ(cuMemHostRegister_v2(address, 2 * kPageBytes, kPortable), 0);
    }
    munmap(memory, 3 * kPageBytes);
    close(file);
  }
}

TEST_F(FakeDriver, memory_to_be_read_is_registered_as_such) {
  void* const memory = mmap(nullptr, kPageBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const auto registered = [&](unsigned flags) {
    return cuMemHostRegister_v2(address_of(memory), kPageBytes, flags);
  };
  restart();
  EXPECT_EQ(registered(kPortable), kInvalidValue);
  EXPECT_EQ(registered(kPortable | kReadOnly), 0);
  EXPECT_EQ(cuMemcpyHtoDAsync_v2(device, address_of(memory), 100, stream), 0);
  EXPECT_EQ(counted().misuses, 0);
  EXPECT_EQ(cuMemcpyDtoHAsync_v2(address_of(memory), device, 100, stream), kInvalidValue);
  expect_misuse("read only");
  restart();
  fake_cuda_attribute(0, 113, 0);
  EXPECT_EQ(registered(kPortable | kReadOnly), kNoSuchOperation);
  fake_cuda_attribute(0, 100, 1);  // the host's page tables say it
  EXPECT_EQ(registered(kPortable), 0);
  restart();
  fake_cuda_attribute(0, 99, 0);
  EXPECT_EQ(registered(kPortable | kReadOnly), kNoSuchOperation);
  EXPECT_EQ(counted().misuses, 0);
  munmap(memory, kPageBytes);
}

// Waits.

// The call is made while a stream stands at a gate, which is opened once it is under way. Did it
// return only when what stood behind the gate was done? Without a wait that had not begun.
class FakeDriverWaits : public RawCuda {
 protected:
  bool waits(uint64_t on, const char* name, bool opens, const std::function<int()>& call) {
    const uint64_t gate = fake_cuda_gate(on);
    std::atomic<bool> done = false;
    launch(on, [&] { done = true; });
    const uint64_t before = fake_cuda_calls(name);
    std::thread opener([&] {
      while (fake_cuda_calls(name) == before) std::this_thread::yield();
      if (opens) fake_cuda_open(gate);
    });
    EXPECT_EQ(call(), 0) << name;
    const bool was_done = done;
    opener.join();
    fake_cuda_finish();
    return was_done;
  }
};

TEST_F(FakeDriverWaits, what_changes_memory_may_wait_for_all_streams) {
  Buffer memory(kRawBytes);
  const uint64_t address = address_of(memory.data());
  uint64_t made = 0;
  struct Call {
    const char* name;
    std::function<int()> make;
  };
  const Call calls[] = {
      {"cuMemAlloc", [&] { return cuMemAlloc_v2(&made, 100); }},
      {"cuMemFree", [&] { return cuMemFree_v2(device); }},
      {"cuMemHostAlloc", [&] { return cuMemHostAlloc(&made, 100, kPortable); }},
      {"cuMemFreeHost", [&] { return cuMemFreeHost(pinned); }},
      {"cuMemHostRegister", [&] { return cuMemHostRegister_v2(address, kRawBytes, kPortable); }},
      {"cuMemHostUnregister", [&] { return cuMemHostUnregister(address); }},
  };
  for (const Call& call : calls) {
    for (const bool rule : {false, true}) {
      restart({.memory_waits = rule});
      if (std::string(call.name) == "cuMemHostUnregister") {
        ASSERT_EQ(cuMemHostRegister_v2(address, kRawBytes, kPortable), 0);
      }
      EXPECT_EQ(waits(fake_cuda_stream(0), call.name, rule, call.make), rule) << call.name;
      EXPECT_EQ(counted().misuses, 0);
    }
  }
}

TEST_F(FakeDriverWaits, copies_with_pageable_memory_may_wait) {
  Buffer memory(kRawBytes);
  const uint64_t pageable = address_of(memory.data());
  const auto out = [&](uint64_t to) { return cuMemcpyDtoHAsync_v2(to, device, 100, stream); };
  const auto in = [&](uint64_t from) { return cuMemcpyHtoDAsync_v2(device, from, 100, stream); };
  for (const bool rule : {false, true}) {
    restart({.pageable_blocks = rule});
    EXPECT_EQ(waits(stream, "cuMemcpyDtoHAsync", rule, [&] { return out(pageable); }), rule);
    EXPECT_EQ(waits(stream, "cuMemcpyHtoDAsync", rule, [&] { return in(pageable); }), rule);
    EXPECT_FALSE(waits(stream, "cuMemcpyDtoHAsync", false, [&] { return out(pinned); }));
    EXPECT_EQ(counted().unregistered_copies, 2);
  }
}

// A stream that the legacy one would wait for.
TEST_F(FakeDriver, the_legacy_stream_is_closed_while_a_blocking_one_is_captured) {
  restart();
  uint64_t event = 0;
  int status = 7;
  ASSERT_EQ(cuEventCreate(&event, 2), 0);
  fake_cuda_capture(stream, 1);
  EXPECT_EQ(cuEventRecord(event, 0), 0) << "this one waits for nothing";
  fake_cuda_capture(stream, 0);
  const uint64_t blocking = fake_cuda_blocking_stream(0);
  fake_cuda_capture(blocking, 1);
  EXPECT_EQ(cuStreamIsCapturing(0, &status), kCaptureImplicit);
  EXPECT_EQ(cuStreamIsCapturing(stream, &status), 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(counted().broken_captures, 0) << "to ask is no use";
  EXPECT_EQ(cuEventRecord(event, 1), kCaptureImplicit);
  EXPECT_EQ(cuMemcpyDtoHAsync_v2(pinned, device, 100, 0), kCaptureImplicit);
  EXPECT_EQ(RawBatch(pinned, device).give(0), kCaptureImplicit);
  EXPECT_EQ(counted().broken_captures, 3);
  fake_cuda_capture(blocking, 0);
  EXPECT_EQ(cuEventRecord(event, 0), 0);
  fake_cuda_settle();
  EXPECT_EQ(cuEventDestroy_v2(event), 0);
}

// What is queued when its memory goes.

// Found when it would have taken place, though nothing waits for that but the end of a test.
TEST_F(FakeDriver, a_copy_does_not_outlive_its_memory) {
  Buffer memory(kRawBytes);
  const uint64_t address = address_of(memory.data());
  const auto enlist = [&] { return cuMemHostRegister_v2(address, kRawBytes, kPortable); };
  const auto leave = [&] { return cuMemHostUnregister(address); };
  const std::function<void()> losses[] = {
      [&] { EXPECT_EQ(cuMemFree_v2(device), 0); },
      [&] { EXPECT_EQ(leave(), 0); },
      [&] {  // at the same address is other memory
        EXPECT_EQ(leave(), 0);
        EXPECT_EQ(enlist(), 0);
      },
      [] {},
  };
  for (const auto& loss : losses) {
    restart();
    ASSERT_EQ(enlist(), 0);
    (void)fake_cuda_gate(stream);
    EXPECT_EQ(cuMemcpyDtoHAsync_v2(address, device, kRawBytes, stream), 0);
    loss();
    EXPECT_EQ(counted().misuses, 0);
    fake_cuda_finish();
    const bool lost = &loss != &losses[3];
    EXPECT_EQ(counted().misuses, lost ? 1 : 0) << "loss " << &loss - losses;
    EXPECT_EQ(counted().copies, lost ? 0 : 1);
    if (lost) expect_misuse("memory of a copy went");
  }
}

// For simulations, whose tensors are the host's.
TEST_F(FakeDriver, any_address_may_be_the_device_s) {
  for (const bool rule : {false, true}) {
    restart({.any_address = rule});
    Buffer memory(kRawBytes, std::byte{3});
    const int result = cuMemcpyDtoHAsync_v2(pinned, address_of(memory.data()), 100, stream);
    EXPECT_EQ(result, rule ? 0 : kInvalidValue);
    EXPECT_EQ(RawBatch(pinned, address_of(memory.data())).give(stream), result);
    fake_cuda_finish();
    EXPECT_EQ(counted().misuses, rule ? 0 : 2);
    EXPECT_EQ(counted().copies, rule ? 3 : 0);
  }
}

}  // namespace
}  // namespace lightckpt
