// Many copies in one call of the driver. Goal: none is made unless the environment allows it; where
// it does, a call takes no more than was tried, and where a driver has none, or refuses, everything
// is copied all the same. Method: the fake driver's counted calls. It asks for an index for each
// copy.
#include <cstdlib>

#include "cuda_helpers.h"
#include "device_cuda.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 40'000;

class CudaBatch : public FakeCuda {
 protected:
  void SetUp() override {
    setenv(kCudaBatchSwitch, "1", 1);
    FakeCuda::SetUp();
  }
  void TearDown() override {
    FakeCuda::TearDown();
    unsetenv(kCudaBatchSwitch);
  }
  // Spans of a hundred bytes each, all of the tensor's.
  static std::vector<CudaSpan> small_spans(const OneDevice& on) {
    std::vector<CudaSpan> spans;
    for (uint64_t at = 0; at < kBytes; at += 100) {
      spans.push_back({on.memory.get() + at, at, 100});
    }
    return spans;
  }
  // Copies them out, and looks whether they came.
  void copy_out(OneDevice* on, uint64_t torch) {
    const Buffer bytes = random_bytes(kBytes, 1);
    std::ranges::copy(bytes, on->tensor().begin());
    std::ranges::fill(on->host(), std::byte{0});
    uint32_t lane = 0;
    uint64_t copy = 0;
    ASSERT_TRUE(is_ok((*on)->order_after(torch, &lane)));
    ASSERT_TRUE(is_ok((*on)->copy_out(lane, small_spans(*on), on->buffer.pinned(), &copy)));
    ASSERT_TRUE(is_ok((*on)->wait(copy, kCudaDeadlineNs)));
    EXPECT_TRUE(std::ranges::equal(bytes, on->host()));
  }
};

// Few calls where the driver can, else one each; nothing asks twice whether it can.
TEST_F(CudaBatch, many_small_copies_take_few_calls) {
  for (const int singly : {0, 1}) {
    start({.copies_singly = singly});
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const size_t count = small_spans(on).size();
    const size_t calls = (count + CudaDriver::kManyMax - 1) / CudaDriver::kManyMax;
    for (uint64_t round = 1; round <= 2; ++round) {
      copy_out(&on, torch);
      EXPECT_EQ(fake_cuda_calls("cuMemcpyBatchAsync"), singly != 0 ? 1 : round * calls);
      EXPECT_EQ(fake_cuda_calls("cuMemcpyDtoHAsync"), singly != 0 ? round * count : 0);
    }
  }
}

TEST_F(CudaBatch, none_is_made_unless_the_environment_says_so) {
  for (const char* words : {"0", "", static_cast<const char*>(nullptr)}) {
    unsetenv(kCudaBatchSwitch);
    if (words != nullptr) setenv(kCudaBatchSwitch, words, 1);
    start({});
    EXPECT_FALSE(driver->in_batches());
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    copy_out(&on, torch);
    EXPECT_EQ(fake_cuda_calls("cuMemcpyBatchAsync"), 0u);
  }
}

TEST_F(CudaBatch, a_switch_that_says_neither_is_refused_in_words) {
  for (const char* words : {"yes", "on", "2", "01", " 1"}) {
    setenv(kCudaBatchSwitch, words, 1);
    std::unique_ptr<CudaDriver> refused;
    EXPECT_TRUE(fails(CudaDriver::load(FAKE_CUDA, &refused), Code::kInvalid,
                      "LIGHTCKPT_CUDA_BATCH is '" + std::string(words) + "': it is 1 where"));
    EXPECT_EQ(refused, nullptr);
  }
}

TEST_F(CudaBatch, what_a_driver_refuses_as_a_batch_is_copied_one_by_one) {
  for (const uint64_t nth : {1, 3}) {
    start({});
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const size_t count = small_spans(on).size();
    fake_cuda_fail("cuMemcpyBatchAsync", nth, 1);  // CUDA_ERROR_INVALID_VALUE
    for (int round = 0; round < 2; ++round) copy_out(&on, torch);
    EXPECT_EQ(fake_cuda_calls("cuMemcpyBatchAsync"), nth);
    const uint64_t in_batches = (nth - 1) * CudaDriver::kManyMax;
    EXPECT_EQ(fake_cuda_calls("cuMemcpyDtoHAsync"), 2 * count - in_batches);
  }
}

}  // namespace
}  // namespace lightckpt
