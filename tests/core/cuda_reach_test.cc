// Reach. Goal: registering goes on where it ended, part by part; what is registered stays so; the
// first error is kept, and says what a device lacks. Method: the fake driver's counts, and a stream
// at a gate for which its calls on memory wait.
#include <thread>

#include "cuda_helpers.h"
#include "reach.h"

namespace lightckpt {
namespace {

constexpr uint64_t kPart = 4096;

class CudaReach : public FakeCuda {
 protected:
  void SetUp() override {
    FakeCuda::SetUp();
    retain();
  }
  void TearDown() override {
    context_.reset();
    FakeCuda::TearDown();
  }
  void retain() { ASSERT_TRUE(is_ok(CudaContext::retain(*driver, 0, &context_))); }
  std::vector<uint64_t> borders(const Reach& reach) {
    const CudaPinned pinned = reach.pinned();
    std::vector<uint64_t> found;
    for (uint64_t at = 0; (at = pinned.border_after(at)) != UINT64_MAX;) found.push_back(at);
    return found;
  }

  std::unique_ptr<CudaContext> context_;
  Buffer memory_ = Buffer(20 * kPart);
};

TEST_F(CudaReach, grows_by_the_new_part_alone) {
  Reach reach(*context_, memory_.data(), false, 4 * kPart);
  EXPECT_EQ(reach.pinned().bytes, 0u);
  reach.extend(10 * kPart);
  EXPECT_TRUE(is_ok(reach.status()));
  EXPECT_EQ(reach.pinned().bytes, 10 * kPart);
  EXPECT_EQ(borders(reach), (std::vector<uint64_t>{4 * kPart, 8 * kPart}));
  const CudaPinned before = reach.pinned();
  reach.extend(11 * kPart);
  reach.extend(11 * kPart);
  reach.extend(5 * kPart);
  EXPECT_EQ(reach.pinned().bytes, 11 * kPart);
  EXPECT_EQ(borders(reach), (std::vector<uint64_t>{4 * kPart, 8 * kPart, 10 * kPart}));
  EXPECT_EQ(fake_cuda_calls("cuMemHostRegister"), 4u);
  EXPECT_EQ(fake_cuda_calls("cuMemHostUnregister"), 0u);
  // Who has the old one sees what that was.
  EXPECT_EQ(before.bytes, 10 * kPart);
  EXPECT_EQ(before.border_after(8 * kPart), UINT64_MAX);
  EXPECT_TRUE(is_ok(reach.reset()));
  EXPECT_EQ(counted().registrations, 0);
  EXPECT_EQ(reach.pinned().bytes, 0u);
}

TEST_F(CudaReach, the_first_error_stays_and_what_was_registered_too) {
  Reach reach(*context_, memory_.data(), false, 4 * kPart);
  fake_cuda_fail("cuMemHostRegister", 3, kOutOfMemory);
  reach.extend(20 * kPart);
  EXPECT_TRUE(fails(reach.status(), Code::kNoSpace, "cuMemHostRegister"));
  EXPECT_EQ(reach.pinned().bytes, 8 * kPart);
  reach.extend(20 * kPart);
  EXPECT_TRUE(fails(reach.status(), Code::kNoSpace, "cuMemHostRegister"));
  EXPECT_EQ(fake_cuda_calls("cuMemHostRegister"), 3u);
  EXPECT_EQ(counted().registrations, 2);
}

TEST_F(CudaReach, the_end_waits_for_one_part_alone) {
  const uint64_t torch = torch_stream();
  const uint64_t gate = fake_cuda_gate(torch);
  Reach reach(*context_, memory_.data(), false, 4 * kPart);
  memory_waits();
  std::thread extending([&] { reach.extend(20 * kPart); });
  while (fake_cuda_calls("cuMemHostRegister") == 0) std::this_thread::yield();
  reach.leave_off();
  fake_cuda_open(gate);
  extending.join();
  EXPECT_TRUE(is_ok(reach.status()));
  EXPECT_EQ(reach.pinned().bytes, 4 * kPart);
  EXPECT_EQ(fake_cuda_calls("cuMemHostRegister"), 1u);
}

TEST_F(CudaReach, what_a_device_lacks_is_said) {
  EXPECT_TRUE(is_ok(may_reach(*driver, 0, true)));
  const std::pair<int, const char*> lacks[] = {{91, "does not take host addresses"},
                                               {99, "host memory cannot be registered"},
                                               {113, "open for reading only"}};
  for (const auto& [attribute, words] : lacks) {
    fake_cuda_attribute(0, attribute, 0);
    const Status status = may_reach(*driver, 0, true);
    EXPECT_TRUE(fails(status, Code::kIo, words));
    EXPECT_TRUE(fails(status, Code::kIo, "attribute " + std::to_string(attribute) + " is 0"));
    EXPECT_LT(status.message().size(), 256u) << "the ABI cuts it";
    EXPECT_EQ(may_reach(*driver, 0, false).ok(), attribute == 113);
    fake_cuda_attribute(0, attribute, 1);
  }
  fake_cuda_fail("cuDeviceGetAttribute", 1, 999);
  EXPECT_TRUE(fails(may_reach(*driver, 0, false), Code::kIo, "cuDeviceGetAttribute"));
}

}  // namespace
}  // namespace lightckpt
