// The fake driver's calls as they are, for tests of the fake itself: what product code calls it
// through checks much of what is to be seen here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda_helpers.h"

extern "C" {
int cuDeviceGetAttribute(int* value, int attribute, int device);
int cuDeviceGet(int* device, int ordinal);
int cuMemAlloc_v2(uint64_t* memory, size_t bytes);
int cuMemFree_v2(uint64_t memory);
int cuMemHostAlloc(uint64_t* memory, size_t bytes, unsigned flags);
int cuMemFreeHost(uint64_t memory);
int cuMemHostRegister_v2(uint64_t memory, size_t bytes, unsigned flags);
int cuMemHostUnregister(uint64_t memory);
int cuMemcpyDtoHAsync_v2(uint64_t target, uint64_t source, size_t bytes, uint64_t stream);
int cuMemcpyHtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, uint64_t stream);
int cuMemcpyBatchAsync(uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count,
                       void* attributes, size_t* indexes, size_t attribute_count, size_t* failed,
                       uint64_t stream);
int cuStreamSynchronize(uint64_t stream);
int cuStreamIsCapturing(uint64_t stream, int* status);
int cuEventCreate(uint64_t* event, unsigned flags);
int cuEventRecord(uint64_t event, uint64_t stream);
int cuEventDestroy_v2(uint64_t event);
}

namespace lightckpt {

inline constexpr uint64_t kRawBytes = 8192;
inline constexpr unsigned kPortable = 1;
inline constexpr unsigned kReadOnly = 8;

inline uint64_t address_of(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

// Two copies, of a page each, and what a batch says of them.
struct RawBatch {
  RawBatch(uint64_t target, uint64_t source)
      : targets{target, target + kRawBytes / 2}, sources{source, source + kRawBytes / 2} {}

  int give(uint64_t stream) {
    return cuMemcpyBatchAsync(targets, sources, sizes, 2, attributes, indexes, attribute_count,
                              &failed, stream);
  }

  uint64_t targets[2];
  uint64_t sources[2];
  size_t sizes[2] = {kRawBytes / 2, kRawBytes / 2};
  int attributes[2][6] = {{1, 0, 0, 0, 0, 1}, {1, 0, 0, 0, 0, 1}};  // read in the stream's order
  size_t indexes[2] = {0, 0};
  size_t attribute_count = 1;
  size_t failed = 7;
};

// A thread with the context of device 0, and memory of each kind.
class RawCuda : public FakeCuda {
 protected:
  void restart(const FakeCudaRules& rules = {}, const FakeCudaOptions& options = {}) {
    start(options);
    fake_cuda_rules(&rules);
    fake_cuda_set_device(0);
    stream = torch_stream();
    ASSERT_EQ(cuMemAlloc_v2(&device, kRawBytes), 0);
    ASSERT_EQ(cuMemHostAlloc(&pinned, kRawBytes, kPortable), 0);
  }
  // A misuse is on the account, and is none of the test's.
  void expect_misuse(const std::string& words) {
    EXPECT_NE(std::string(fake_cuda_misuse()).find(words), std::string::npos) << fake_cuda_misuse();
    EXPECT_GT(counted().misuses, 0);
  }
  void TearDown() override {
    start({});
    FakeCuda::TearDown();
  }

  uint64_t stream = 0;
  uint64_t device = 0;
  uint64_t pinned = 0;
};

}  // namespace lightckpt
