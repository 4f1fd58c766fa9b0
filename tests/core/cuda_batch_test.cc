// Many copies in one call of the driver. Goal: it is used where there is one, and where a driver
// has none, or refuses, everything is copied all the same. Method: the fake driver's counted calls.
#include "cuda_helpers.h"
#include "device_cuda.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 40'000;

using CudaBatch = FakeCuda;

// One call where the driver can, else one each; nothing asks twice whether it can.
TEST_F(CudaBatch, many_small_copies_take_few_calls) {
  for (const int singly : {0, 1}) {
    start({.copies_singly = singly});
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const Buffer bytes = random_bytes(kBytes, 1);
    std::ranges::copy(bytes, on.tensor().begin());
    std::vector<CudaSpan> spans;
    for (uint64_t at = 0; at + 10 <= kBytes; at += 10) {
      spans.push_back({on.memory.get() + at, at, 10});
    }
    for (uint64_t round = 1; round <= 2; ++round) {
      uint32_t lane = 0;
      uint64_t copy = 0;
      std::ranges::fill(on.host(), std::byte{0});
      ASSERT_TRUE(is_ok(on->order_after(torch, &lane)));
      ASSERT_TRUE(is_ok(on->copy_out(lane, spans, on.buffer.pinned(), &copy)));
      ASSERT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
      for (const CudaSpan& span : spans) {
        EXPECT_TRUE(std::ranges::equal(std::span(bytes).subspan(span.offset, span.bytes),
                                       on.host().subspan(span.offset, span.bytes)));
      }
      EXPECT_EQ(fake_cuda_calls("cuMemcpyBatchAsync"), singly != 0 ? 1 : round);
      EXPECT_EQ(fake_cuda_calls("cuMemcpyDtoHAsync"), singly != 0 ? round * spans.size() : 0);
    }
  }
}

TEST_F(CudaBatch, what_a_driver_refuses_as_a_batch_is_copied_one_by_one) {
  start({});
  OneDevice on(*driver, 0, kBytes);
  on.fill(7);
  const CudaSpan spans[] = {{on.memory.get(), 0, 1000}, {on.memory.get() + 1000, 1000, 1000}};
  fake_cuda_fail("cuMemcpyBatchAsync", 1, 1);  // CUDA_ERROR_INVALID_VALUE
  for (int round = 0; round < 2; ++round) {
    uint64_t copy = 0;
    std::ranges::fill(on.host(), std::byte{0});
    ASSERT_TRUE(is_ok(on->copy_out(0, spans, on.buffer.pinned(), &copy)));
    ASSERT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
    EXPECT_TRUE(all_are(on.host().first(2000), 7));
  }
  EXPECT_EQ(fake_cuda_calls("cuMemcpyBatchAsync"), 1u);
}

}  // namespace
}  // namespace lightckpt
