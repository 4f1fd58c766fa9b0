// CudaDriver and what it makes. Goal: a library that is missing or another is one clear status;
// every error of every call is returned with its name, and leaves nothing behind, neither objects
// nor a thread's context and capture mode. Method: a fake driver that fails the n-th call, for
// every n until none is left, and counts what lives.
#include "cuda_driver.h"

#include <thread>

#include "cuda_helpers.h"
#include "cuda_objects.h"
#include "reach.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 1 << 16;
constexpr int kIllegalAddress = 700;

TEST(CudaLibrary, that_is_missing_or_another_is_not_found) {
  std::unique_ptr<CudaDriver> driver;
  EXPECT_TRUE(fails(CudaDriver::load("libno-such-thing.so.1", &driver), Code::kNotFound,
                    "install NVIDIA's driver"));
  EXPECT_TRUE(fails(CudaDriver::load("libc.so.6", &driver), Code::kNotFound, "has no cuInit"));
  EXPECT_EQ(driver, nullptr);
}

TEST(CudaLibrary, of_the_machine_is_there_or_not_found) {
  const CudaDriver* driver = nullptr;
  const Status status = CudaDriver::load(&driver);
  EXPECT_EQ(status.ok(), driver != nullptr);
  const CudaDriver* again = nullptr;
  EXPECT_EQ(CudaDriver::load(&again).code(), status.code());
  EXPECT_EQ(again, driver);
}

class CudaDriverTest : public FakeCuda {
 protected:
  // All that can be made, used and given back once. Objects that are left end by themselves.
  Status use_everything() {
    int count = 0;
    int version = 0;
    std::string name;
    RETURN_IF_ERROR(driver->init());
    RETURN_IF_ERROR(driver->version(&version));
    RETURN_IF_ERROR(driver->device_count(&count));
    RETURN_IF_ERROR(driver->device_name(0, &name));
    RETURN_IF_ERROR(may_reach(*driver, 0, true));
    std::unique_ptr<CudaContext> context;
    RETURN_IF_ERROR(CudaContext::retain(*driver, 0, &context));
    Status status = use_context(*context);
    if (const Status released = context->release(); status.ok()) status = released;
    return status;
  }

  Status use_context(const CudaContext& context) {
    CudaStream stream;
    CudaEvent event;
    CudaMemory from;
    CudaMemory to;
    CudaPinnedBuffer pinned;
    Reach reach(context, mapping_.data(), false, kBytes / 4);
    RETURN_IF_ERROR(make_stream(context, &stream));
    RETURN_IF_ERROR(make_event(context, &event));
    RETURN_IF_ERROR(make_memory(context, kBytes, &from));
    RETURN_IF_ERROR(make_memory(context, kBytes, &to));
    RETURN_IF_ERROR(CudaPinnedBuffer::make(context, kBytes, &pinned));
    reach.extend(mapping_.size());
    RETURN_IF_ERROR(reach.status());
    const Status used = context.inside([&]() -> Status {
      bool done = false;
      RETURN_IF_ERROR(driver->stream_capturing(stream.get(), &done));
      RETURN_IF_ERROR(driver->event_record(event.get(), stream.get()));
      RETURN_IF_ERROR(driver->stream_wait_event(stream.get(), event.get()));
      void* const host = pinned.pinned().memory;
      RETURN_IF_ERROR(driver->copy_to_device(from.get(), host, kBytes, stream.get()));
      RETURN_IF_ERROR(driver->copy_on_device(to.get(), from.get(), kBytes, stream.get()));
      RETURN_IF_ERROR(driver->copy_to_host(host, to.get(), kBytes, stream.get()));
      RETURN_IF_ERROR(driver->event_query(event.get(), &done));
      RETURN_IF_ERROR(driver->stream_query(stream.get(), &done));
      CudaPointerInfo info;
      RETURN_IF_ERROR(driver->pointer_info(to.get(), &info));
      RETURN_IF_ERROR(driver->event_synchronize(event.get()));
      return driver->stream_synchronize(stream.get());
    });
    // What was given stays until it is through, whatever failed.
    fake_cuda_settle();
    RETURN_IF_ERROR(used);
    RETURN_IF_ERROR(reach.reset());
    RETURN_IF_ERROR(pinned.reset());
    RETURN_IF_ERROR(from.reset());
    RETURN_IF_ERROR(to.reset());
    RETURN_IF_ERROR(event.reset());
    return stream.reset();
  }

 private:
  Buffer mapping_ = Buffer(kBytes);
};

TEST_F(CudaDriverTest, tells_versions_and_devices) {
  start({.devices = 3});
  int count = 0;
  int version = 0;
  std::string name;
  ASSERT_TRUE(is_ok(driver->version(&version)));
  EXPECT_EQ(version, 13000);
  ASSERT_TRUE(is_ok(driver->device_count(&count)));
  EXPECT_EQ(count, 3);
  ASSERT_TRUE(is_ok(driver->device_name(2, &name)));
  EXPECT_EQ(name, "Fake GPU 2");
  EXPECT_TRUE(fails(driver->device_name(3, &name), Code::kNotFound, "cuDeviceGet"));
}

TEST_F(CudaDriverTest, a_machine_without_devices_says_so) {
  const FakeCudaOptions none = {.devices = 0};
  fake_cuda_reset(&none);
  EXPECT_TRUE(fails(driver->init(), Code::kNotFound, "cuInit"));
  const FakeCudaOptions one;
  fake_cuda_reset(&one);
}

TEST_F(CudaDriverTest, every_error_is_returned_and_leaves_nothing) {
  const auto before = live();
  ASSERT_TRUE(is_ok(use_everything()));
  uint64_t calls = 0;
  for (uint64_t nth = 1;; ++nth) {
    fake_cuda_fail(nullptr, nth, kOutOfMemory);
    const Status status = use_everything();
    EXPECT_EQ(live(), before) << "call " << nth << ": " << status.message();
    if (fake_cuda_unfail() != 0) {
      EXPECT_TRUE(is_ok(status));
      break;
    }
    EXPECT_TRUE(fails(status, Code::kNoSpace, "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"))
        << "call " << nth;
    calls = nth;
  }
  EXPECT_GT(calls, 80u);
}

// As above on a thread of torch's, that has the context itself: it must keep it.
TEST_F(CudaDriverTest, errors_leave_the_context_that_a_thread_had) {
  for (const int round : {0, 1, 2, 3}) {
    // Popping a context may fail before or after it is done.
    const int device = round % 2;
    start({.devices = 2, .pop_fails_late = round / 2});
    (void)torch_stream(device);
    std::thread([&] {
      fake_cuda_set_device(device);
      const auto before = live();
      for (uint64_t nth = 1;; ++nth) {
        fake_cuda_fail(nullptr, nth, 999);
        const Status status = use_everything();
        ASSERT_EQ(live(), before) << "call " << nth << ", round " << round;
        if (fake_cuda_unfail() != 0) break;
        EXPECT_TRUE(fails(status, Code::kIo, "CUDA error 999")) << "call " << nth;
      }
    }).join();
  }
}

TEST_F(CudaDriverTest, a_lost_context_is_said_to_be_lost_by_every_call) {
  std::unique_ptr<CudaContext> context;
  CudaStream stream;
  ASSERT_TRUE(is_ok(CudaContext::retain(*driver, 0, &context)));
  ASSERT_TRUE(is_ok(make_stream(*context, &stream)));
  fake_cuda_fail("cuStreamQuery", 1, kIllegalAddress);
  for (int i = 0; i < 3; ++i) {
    const Status status = context->inside([&] {
      bool done = false;
      return driver->stream_query(stream.get(), &done);
    });
    EXPECT_TRUE(fails(status, Code::kIo, "CUDA_ERROR_ILLEGAL_ADDRESS; CUDA returns this"));
  }
  CudaEvent event;
  EXPECT_TRUE(fails(make_event(*context, &event), Code::kIo, "until the process ends"));
}

TEST_F(CudaDriverTest, streams_are_of_the_highest_priority_and_do_not_block) {
  std::unique_ptr<CudaContext> context;
  CudaStream stream;
  ASSERT_TRUE(is_ok(CudaContext::retain(*driver, 0, &context)));
  ASSERT_TRUE(is_ok(make_stream(*context, &stream)));
  EXPECT_EQ(counted().highest_priority, 1);
}

TEST_F(CudaDriverTest, a_graph_that_another_thread_captures_stays_whole) {
  const uint64_t torch = torch_stream();
  fake_cuda_capture(torch, 1);
  EXPECT_TRUE(is_ok(use_everything()));
  EXPECT_EQ(counted().broken_captures, 0);
  // The test of the test: without a context's care it would have broken.
  fake_cuda_set_device(0);
  CudaStreamHandle stream = nullptr;
  EXPECT_TRUE(fails(driver->stream_create(&stream), Code::kIo, "900"));
  EXPECT_EQ(counted().broken_captures, 1);
  fake_cuda_capture(torch, 0);
  start({});
}

TEST_F(CudaDriverTest, a_registration_that_is_refused_is_an_error_and_no_more) {
  start({.refuse_registration = 801});
  EXPECT_TRUE(fails(use_everything(), Code::kIo, "cuMemHostRegister"));
}

TEST_F(CudaDriverTest, pointers_are_told_apart) {
  start({.devices = 2});
  std::unique_ptr<CudaContext> context;
  CudaMemory memory;
  CudaPinnedBuffer pinned;
  ASSERT_TRUE(is_ok(CudaContext::retain(*driver, 1, &context)));
  ASSERT_TRUE(is_ok(make_memory(*context, kBytes, &memory)));
  ASSERT_TRUE(is_ok(CudaPinnedBuffer::make(*context, kBytes, &pinned)));
  CudaPointerInfo info;
  ASSERT_TRUE(is_ok(driver->pointer_info(memory.get() + kBytes - 1, &info)));
  EXPECT_EQ(info.type, CudaMemoryType::kDevice);
  EXPECT_EQ(info.device, 1);
  const auto address_of = [](const void* host) { return reinterpret_cast<CudaPointer>(host); };
  ASSERT_TRUE(is_ok(driver->pointer_info(address_of(pinned.pinned().memory), &info)));
  EXPECT_EQ(info.type, CudaMemoryType::kHost);
  ASSERT_TRUE(is_ok(driver->pointer_info(address_of(&info), &info)));
  EXPECT_EQ(info.type, CudaMemoryType::kUnknown);
  EXPECT_EQ(info.device, -1);
}

TEST_F(CudaDriverTest, objects_move_and_end_once) {
  std::unique_ptr<CudaContext> context;
  ASSERT_TRUE(is_ok(CudaContext::retain(*driver, 0, &context)));
  CudaEvent first;
  CudaEvent second;
  ASSERT_TRUE(is_ok(make_event(*context, &first)));
  ASSERT_TRUE(is_ok(make_event(*context, &second)));
  EXPECT_EQ(counted().events, 2);
  first = std::move(second);
  EXPECT_EQ(counted().events, 1);
  CudaEvent third(std::move(first));
  EXPECT_EQ(counted().events, 1);
  EXPECT_TRUE(is_ok(third.reset()));
  EXPECT_TRUE(is_ok(third.reset()));
  EXPECT_EQ(counted().events, 0);
}

}  // namespace
}  // namespace lightckpt
