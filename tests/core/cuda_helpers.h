// A fake driver for each test (tests/fake_cuda), and the few lines that the tests of CUDA share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda_objects.h"
#include "device_cuda.h"
#include "fake_cuda.h"
#include "helpers.h"

namespace lightckpt {

inline FakeCudaCounters counted() {
  FakeCudaCounters counters;
  fake_cuda_counters(&counters);
  return counters;
}

// What a test must leave as it found it.
inline std::vector<int64_t> live() {
  const FakeCudaCounters now = counted();
  return {now.contexts,         now.streams,       now.events, now.device_allocations,
          now.host_allocations, now.registrations, now.depth,  now.capture_mode};
}

inline constexpr int kOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY

// Starts from a fake driver that has done nothing, and ends with one that was not misused, also by
// what was still queued.
class FakeCuda : public testing::Test {
 protected:
  void SetUp() override { start({}); }
  void TearDown() override {
    fake_cuda_finish();
    EXPECT_EQ(live(), before_);
    EXPECT_EQ(counted().misuses, 0) << fake_cuda_misuse();
    EXPECT_EQ(counted().unregistered_copies, 0);
    EXPECT_EQ(counted().broken_captures, 0);
    EXPECT_EQ(fake_cuda_unfail(), 0) << "a failure was asked for and did not happen";
    closures_.clear();
    fake_cuda_reset(&options_);
  }

  void start(const FakeCudaOptions& options) {
    options_ = options;
    fake_cuda_reset(&options);
    ASSERT_TRUE(is_ok(CudaDriver::load(FAKE_CUDA, &driver)));
    ASSERT_TRUE(is_ok(driver->init()));
    before_ = live();
  }
  // As torch is when it has a stream: what is there from now on is to be there in the end.
  uint64_t torch_stream(int device = 0) {
    const uint64_t stream = fake_cuda_stream(device);
    before_ = live();
    return stream;
  }
  // Calls that allocate, register or free memory wait for all streams from now on.
  static void memory_waits() {
    const FakeCudaRules rules = {.memory_waits = 1};
    fake_cuda_rules(&rules);
  }
  // A kernel. It must not throw, and runs before the test's end.
  void launch(uint64_t stream, std::function<void()> kernel) {
    closures_.push_back(std::make_unique<std::function<void()>>(std::move(kernel)));
    const auto run = [](void* closure) { (*static_cast<std::function<void()>*>(closure))(); };
    fake_cuda_enqueue(stream, run, closures_.back().get());
  }

  // Runs `use` with its first call of the driver failing, then its second, up to none: each time
  // the error comes back and nothing lives on that was not there `before`. Returns how many calls.
  uint64_t fail_each_call(const std::vector<int64_t>& before, const std::function<Status()>& use) {
    for (uint64_t nth = 1;; ++nth) {
      fake_cuda_fail(nullptr, nth, kOutOfMemory);
      const Status status = use();
      EXPECT_EQ(live(), before) << "call " << nth << ": " << status.message();
      EXPECT_EQ(counted().misuses, 0) << "call " << nth << ": " << fake_cuda_misuse();
      if (fake_cuda_unfail() != 0) {
        EXPECT_TRUE(is_ok(status));
        return nth - 1;
      }
      EXPECT_TRUE(fails(status, Code::kNoSpace, "OUT_OF_MEMORY")) << "call " << nth;
      if (HasFailure()) return 0;
    }
  }

  std::unique_ptr<CudaDriver> driver;

 private:
  FakeCudaOptions options_;
  std::vector<int64_t> before_;
  std::vector<std::unique_ptr<std::function<void()>>> closures_;
};

// A device with all that goes with it, in an order in which it can end; and a tensor on it. Kernels
// and tests get at its bytes, nobody else on the host does.
struct OneDevice {
  OneDevice(const CudaDriver& driver, int ordinal, uint64_t bytes, uint32_t lanes = 2) {
    EXPECT_TRUE(is_ok(CudaContext::retain(driver, ordinal, &context)));
    EXPECT_TRUE(is_ok(make_memory(*context, bytes, &memory)));
    EXPECT_TRUE(is_ok(CudaPinnedBuffer::make(*context, bytes, &buffer)));
    EXPECT_TRUE(is_ok(CudaDevice::open(*context, lanes, &device)));
    fill(0);
    std::ranges::fill(host(), std::byte{0xee});
  }
  OneDevice(const OneDevice&) = delete;
  OneDevice& operator=(const OneDevice&) = delete;
  // Kernels that nobody waited for write to the memory that goes now.
  ~OneDevice() { fake_cuda_settle(); }

  CudaDevice* operator->() { return device.get(); }
  std::span<std::byte> tensor() const {
    return {static_cast<std::byte*>(fake_cuda_memory(memory.get())), buffer.pinned().bytes};
  }
  std::span<std::byte> host() const { return {buffer.pinned().memory, buffer.pinned().bytes}; }
  std::vector<CudaSpan> whole() const { return {{memory.get(), 0, buffer.pinned().bytes}}; }
  void fill(int value) const { std::ranges::fill(tensor(), static_cast<std::byte>(value)); }

  // After what the stream has, all of the tensor.
  Status copy_out(uint64_t stream, uint64_t* copy) {
    uint32_t lane = 0;
    RETURN_IF_ERROR(device->order_after(stream, &lane));
    return device->copy_out(lane, whole(), buffer.pinned(), copy);
  }
  Status copy_in(uint64_t stream, uint64_t* copy) {
    uint32_t lane = 0;
    RETURN_IF_ERROR(device->order_after(stream, &lane));
    return device->copy_in(lane, whole(), buffer.pinned(), copy);
  }

  std::unique_ptr<CudaContext> context;
  CudaMemory memory;
  CudaPinnedBuffer buffer;
  std::unique_ptr<CudaDevice> device;
};

inline bool all_are(std::span<const std::byte> bytes, int value) {
  return std::ranges::all_of(bytes, [&](std::byte b) { return b == std::byte(value); });
}

inline constexpr int64_t kCudaDeadlineNs = std::chrono::nanoseconds(kDeadline).count();

}  // namespace lightckpt
