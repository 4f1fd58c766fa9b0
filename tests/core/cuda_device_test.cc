// CudaDevice. Goal: a copy has all that the caller's stream was given before, nothing that it was
// given after its guard, in both directions, and no call but `wait` and the end waits for the
// device; errors leave nothing under way that nobody knows of. Method: a fake driver whose streams
// stand at gates that the test opens, or are late by random whiles; kernels are functions on a
// stream. That the order comes from the waits is shown by a driver that leaves them out.
#include <thread>

#include "cuda_helpers.h"
#include "device_cuda.h"
#include "reach.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 40'000;

class CudaDeviceTest : public FakeCuda {
 protected:
  // A kernel at a gate, a copy, the guard, the next update. Returns what was copied before the gate
  // was opened, and checks nothing.
  int64_t copies_before_gate(OneDevice* on, uint64_t torch, uint64_t* copy) {
    const uint64_t gate = fake_cuda_gate(torch);
    launch(torch, [on] { on->fill(1); });
    EXPECT_TRUE(is_ok(on->copy_out(torch, copy)));
    EXPECT_TRUE(is_ok((*on)->stream_wait(*copy, torch)));
    launch(torch, [on] { on->fill(2); });
    fake_cuda_settle();
    const int64_t copies = counted().copies;
    fake_cuda_open(gate);
    fake_cuda_settle();
    return copies;
  }
};

TEST_F(CudaDeviceTest, a_copy_has_the_last_update_and_nothing_of_the_next) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  uint64_t copy = 0;
  EXPECT_EQ(copies_before_gate(&on, torch, &copy), 0);
  EXPECT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
  EXPECT_TRUE(all_are(on.host(), 1));
  EXPECT_TRUE(all_are(on.tensor(), 2));
}

TEST_F(CudaDeviceTest, without_waits_the_copy_comes_too_early) {
  start({.ignore_waits = 1});
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  uint64_t copy = 0;
  EXPECT_EQ(copies_before_gate(&on, torch, &copy), 1);
  EXPECT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
  EXPECT_TRUE(all_are(on.host(), 0));
}

TEST_F(CudaDeviceTest, the_guard_holds_the_stream_that_is_named_and_no_other) {
  for (const bool guarded : {true, false}) {
    const uint64_t first = torch_stream();
    const uint64_t second = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const uint64_t gate = fake_cuda_gate(first);
    uint64_t copy = 0;
    bool updated = false;
    ASSERT_TRUE(is_ok(on.copy_out(first, &copy)));
    const Status held = guarded ? on->stream_wait(copy, second) : Status();
    ASSERT_TRUE(is_ok(held));
    launch(second, [&] { updated = true; });
    fake_cuda_settle();
    EXPECT_EQ(updated, !guarded);
    fake_cuda_open(gate);
    fake_cuda_settle();
    EXPECT_TRUE(updated);
    ASSERT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
  }
}

TEST_F(CudaDeviceTest, what_is_loaded_comes_after_old_readers_and_before_new_ones) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const uint64_t gate = fake_cuda_gate(torch);
  bool old_read = false;
  bool new_read = false;
  uint64_t copy = 0;
  launch(torch, [&] { old_read = all_are(on.tensor(), 0); });
  ASSERT_TRUE(is_ok(on.copy_in(torch, &copy)));
  ASSERT_TRUE(is_ok(on->stream_wait(copy, torch)));
  launch(torch, [&] { new_read = all_are(on.tensor(), 0xee); });
  fake_cuda_settle();
  EXPECT_EQ(counted().copies, 0);
  fake_cuda_open(gate);
  ASSERT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
  fake_cuda_settle();
  EXPECT_TRUE(old_read);
  EXPECT_TRUE(new_read);
}

// Many steps on streams that are late at random; each step's copy goes to a place of its own.
TEST_F(CudaDeviceTest, of_many_steps_each_copy_is_of_one) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    start({.seed = seed, .delay_us_max = 100});
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes, 1 + seed % 3);
    constexpr int kSteps = 20;
    Buffer mapping(kSteps * kBytes);
    Reach store(*on.context, mapping.data(), false, kBytes);
    store.extend(mapping.size());
    ASSERT_TRUE(is_ok(store.status()));
    uint64_t copies[kSteps] = {};
    for (int step = 0; step < kSteps; ++step) {
      uint32_t lane = 0;
      launch(torch, [&on, step] { on.fill(step); });
      ASSERT_TRUE(is_ok(on->order_after(torch, &lane)));
      const uint64_t at = static_cast<uint64_t>(step) * kBytes;
      const CudaSpan spans[] = {{on.memory.get() + 1000, at + 1000, kBytes - 1000},
                                {on.memory.get(), at, 1000}};
      ASSERT_TRUE(is_ok(on->copy_out(lane, spans, store.pinned(), &copies[step])));
      ASSERT_TRUE(is_ok(on->stream_wait(copies[step], torch)));
    }
    for (int step = kSteps; step-- > 0;) {
      ASSERT_TRUE(is_ok(on->wait(copies[step], kCudaDeadlineNs)));
      const auto bytes = std::span(mapping).subspan(static_cast<uint64_t>(step) * kBytes, kBytes);
      EXPECT_TRUE(all_are(bytes, step)) << "step " << step << ", seed " << seed;
    }
    on.device.reset();
  }
}

TEST_F(CudaDeviceTest, default_streams_are_ordered_too) {
  (void)torch_stream();
  std::thread([&] {
    fake_cuda_set_device(0);
    for (const uint64_t stream : {0, 1, 2}) {
      OneDevice on(*driver, 0, kBytes);
      const int64_t before = counted().copies;
      uint64_t copy = 0;
      EXPECT_EQ(copies_before_gate(&on, stream, &copy), before);
      EXPECT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
      EXPECT_TRUE(all_are(on.host(), 1));
    }
  }).join();
}

TEST_F(CudaDeviceTest, a_stream_that_records_a_graph_is_refused) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  uint64_t copy = 0;
  ASSERT_TRUE(is_ok(on.copy_out(torch, &copy)));
  fake_cuda_capture(torch, 1);
  uint64_t other = 0;
  EXPECT_TRUE(fails(on.copy_out(torch, &other), Code::kBusy, "CUDA graph"));
  EXPECT_TRUE(fails(on->stream_wait(copy, torch), Code::kBusy, "CUDA graph"));
  EXPECT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
  fake_cuda_capture(torch, 0);
}

TEST_F(CudaDeviceTest, waits_end_at_their_time) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const uint64_t gate = fake_cuda_gate(torch);
  uint64_t copy = 0;
  bool done = true;
  ASSERT_TRUE(is_ok(on.copy_out(torch, &copy)));
  EXPECT_TRUE(fails(on->wait(copy, 0), Code::kTimeout, "0 ms"));
  EXPECT_TRUE(fails(on->wait(copy, 2'000'000), Code::kTimeout, "2 ms"));
  EXPECT_TRUE(is_ok(on->done(copy, &done)));
  EXPECT_FALSE(done);
  std::thread waiter([&] { EXPECT_TRUE(is_ok(on->wait(copy, -1))); });
  fake_cuda_open(gate);
  waiter.join();
  EXPECT_TRUE(is_ok(on->done(copy, &done)));
  EXPECT_TRUE(done);
  // One that was seen done stays so, and orders nothing.
  EXPECT_TRUE(is_ok(on->wait(copy, 0)));
  EXPECT_TRUE(is_ok(on->stream_wait(copy, torch)));
}

TEST_F(CudaDeviceTest, in_steady_state_nothing_is_made) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  uint64_t copy = 0;
  ASSERT_TRUE(is_ok(on.copy_out(torch, &copy)));
  ASSERT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
  const uint64_t made = fake_cuda_calls("cuEventCreate");
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(is_ok(on.copy_out(torch, &copy)));
    // Half of them nobody asks for.
    fake_cuda_settle();
    ASSERT_TRUE(is_ok(i % 2 == 0 ? on->wait(copy, 0) : Status()));
  }
  EXPECT_LE(fake_cuda_calls("cuEventCreate"), made + 8);
  EXPECT_EQ(counted().host_allocations, 1);
}

TEST_F(CudaDeviceTest, copies_under_way_are_bounded) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const uint64_t gate = fake_cuda_gate(torch);
  uint32_t lane = 0;
  uint64_t copy = 0;
  ASSERT_TRUE(is_ok(on->order_after(torch, &lane)));
  for (size_t i = 0; i < CudaDevice::kCopiesMax; ++i) {
    ASSERT_TRUE(is_ok(on->copy_out(lane, {}, on.buffer.pinned(), &copy)));
  }
  uint64_t other = 0;
  const Status status = on->copy_out(lane, {}, on.buffer.pinned(), &other);
  EXPECT_TRUE(fails(status, Code::kBusy, "4096 copies are under way"));
  EXPECT_EQ(other, 0u);
  fake_cuda_open(gate);
  EXPECT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
  EXPECT_TRUE(is_ok(on->copy_out(lane, {}, on.buffer.pinned(), &other)));
}

TEST_F(CudaDeviceTest, spans_do_not_cross_borders) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  Buffer mapping(kBytes);
  Reach store(*on.context, mapping.data(), false, 4096);
  store.extend(kBytes);
  ASSERT_TRUE(is_ok(store.status()));
  const Buffer bytes = random_bytes(kBytes, 1);
  std::ranges::copy(bytes, on.tensor().begin());
  uint32_t lane = 0;
  uint64_t copy = 0;
  const CudaSpan spans[] = {{on.memory.get() + 100, 100, 5000},
                            {on.memory.get() + 5100, 5100, 0},
                            {on.memory.get() + 5100, 5100, kBytes - 5100},
                            {on.memory.get(), 0, 100}};
  ASSERT_TRUE(is_ok(on->order_after(torch, &lane)));
  ASSERT_TRUE(is_ok(on->copy_out(lane, spans, store.pinned(), &copy)));
  ASSERT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
  EXPECT_EQ(mapping, bytes);
  on.fill(0);
  ASSERT_TRUE(is_ok(on->copy_in(lane, spans, store.pinned(), &copy)));
  ASSERT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
  EXPECT_TRUE(std::ranges::equal(on.tensor(), bytes));
}

TEST_F(CudaDeviceTest, a_copy_aside_lets_the_update_go_on) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  CudaMemory aside;
  ASSERT_TRUE(is_ok(make_memory(*on.context, kBytes, &aside)));
  uint32_t lane = 0;
  uint64_t copied = 0;
  uint64_t out = 0;
  launch(torch, [&] { on.fill(1); });
  ASSERT_TRUE(is_ok(on->order_after(torch, &lane)));
  const CudaPair pairs[] = {{aside.get(), on.memory.get(), kBytes}};
  ASSERT_TRUE(is_ok(on->copy_aside(lane, pairs, &copied)));
  ASSERT_TRUE(is_ok(on->stream_wait(copied, torch)));
  launch(torch, [&] { on.fill(2); });
  fake_cuda_settle();
  EXPECT_TRUE(all_are(on.tensor(), 2));
  const CudaSpan spans[] = {{aside.get(), 0, kBytes}};
  ASSERT_TRUE(is_ok(on->copy_out(lane, spans, on.buffer.pinned(), &out)));
  ASSERT_TRUE(is_ok(on->wait(out, kCudaDeadlineNs)));
  EXPECT_TRUE(all_are(on.host(), 1));
}

// Also if CUDA's own wait returns what somebody else did wrong.
TEST_F(CudaDeviceTest, the_end_waits_for_what_is_under_way) {
  for (const bool failing : {false, true}) {
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes, 1);
    const uint64_t gate = fake_cuda_gate(torch);
    const int64_t before = counted().copies;
    uint64_t copy = 0;
    launch(torch, [&] { on.fill(1); });
    ASSERT_TRUE(is_ok(on.copy_out(torch, &copy)));
    if (failing) fake_cuda_fail("cuStreamSynchronize", 1, kOutOfMemory);
    std::thread end([&] { EXPECT_EQ(on->close().ok(), !failing); });
    fake_cuda_settle();
    EXPECT_EQ(counted().copies, before);
    fake_cuda_open(gate);
    end.join();
    EXPECT_TRUE(all_are(on.host(), 1));
  }
}

TEST_F(CudaDeviceTest, a_number_is_of_one_copy) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  uint64_t first = 0;
  uint64_t second = 0;
  ASSERT_TRUE(is_ok(on.copy_out(torch, &first)));
  ASSERT_TRUE(is_ok(on->wait(first, kCudaDeadlineNs)));
  const uint64_t gate = fake_cuda_gate(torch);
  ASSERT_TRUE(is_ok(on.copy_out(torch, &second)));
  EXPECT_NE(first, second);
  EXPECT_TRUE(is_ok(on->wait(first, 0)));
  EXPECT_TRUE(fails(on->wait(second, 0), Code::kTimeout));
  fake_cuda_open(gate);
}

TEST_F(CudaDeviceTest, devices_do_not_wait_for_one_another) {
  start({.devices = 2});
  const uint64_t first = torch_stream(0);
  const uint64_t second = torch_stream(1);
  OneDevice on_first(*driver, 0, kBytes);
  OneDevice on_second(*driver, 1, kBytes);
  const uint64_t gate = fake_cuda_gate(first);
  uint64_t held = 0;
  uint64_t free = 0;
  launch(second, [&] { on_second.fill(5); });
  ASSERT_TRUE(is_ok(on_first.copy_out(first, &held)));
  ASSERT_TRUE(is_ok(on_second.copy_out(second, &free)));
  EXPECT_TRUE(is_ok(on_second->wait(free, kCudaDeadlineNs)));
  EXPECT_TRUE(all_are(on_second.host(), 5));
  EXPECT_TRUE(fails(on_first->wait(held, 0), Code::kTimeout));
  fake_cuda_open(gate);
  EXPECT_TRUE(is_ok(on_first->wait(held, kCudaDeadlineNs)));
}

TEST_F(CudaDeviceTest, a_copy_that_fails_half_way_is_known) {
  start({.copies_singly = 1});
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const CudaSpan spans[] = {{on.memory.get(), 0, 1000}, {on.memory.get() + 1000, 1000, 1000}};
  const uint64_t gate = fake_cuda_gate(torch);
  uint32_t lane = 0;
  uint64_t copy = 0;
  ASSERT_TRUE(is_ok(on->order_after(torch, &lane)));
  fake_cuda_fail("cuMemcpyDtoHAsync", 2, kOutOfMemory);
  EXPECT_TRUE(fails(on->copy_out(lane, spans, on.buffer.pinned(), &copy), Code::kNoSpace,
                    "cuMemcpyDtoHAsync"));
  ASSERT_NE(copy, 0u);
  EXPECT_TRUE(fails(on->wait(copy, 0), Code::kTimeout));
  uint64_t unmarked = 0;
  fake_cuda_fail("cuEventRecord", 1, kOutOfMemory);
  EXPECT_TRUE(fails(on->copy_out(lane, spans, on.buffer.pinned(), &unmarked), Code::kNoSpace));
  ASSERT_NE(unmarked, 0u);
  EXPECT_TRUE(fails(on->stream_wait(unmarked, torch), Code::kIo, "no event"));
  EXPECT_TRUE(fails(on->wait(unmarked, 0), Code::kTimeout));
  fake_cuda_open(gate);
  EXPECT_TRUE(is_ok(on->wait(copy, kCudaDeadlineNs)));
  EXPECT_TRUE(is_ok(on->wait(unmarked, kCudaDeadlineNs)));
  EXPECT_TRUE(all_are(on.host().first(1000), 0));
}

// Whatever call fails: its error is returned by one of ours, nothing lives on, and no memory goes
// while a copy needs it, which the fake would count as misuse.
TEST_F(CudaDeviceTest, every_error_is_returned_and_leaves_nothing) {
  const uint64_t torch = torch_stream();
  std::unique_ptr<CudaContext> context;
  ASSERT_TRUE(is_ok(CudaContext::retain(*driver, 0, &context)));
  const auto before = live();
  const auto use = [&]() -> Status {
    CudaMemory memory;
    CudaPinnedBuffer buffer;
    std::unique_ptr<CudaDevice> device;
    RETURN_IF_ERROR(make_memory(*context, kBytes, &memory));
    RETURN_IF_ERROR(CudaPinnedBuffer::make(*context, kBytes, &buffer));
    RETURN_IF_ERROR(CudaDevice::open(*context, 2, &device));
    const CudaSpan spans[] = {{memory.get(), 0, kBytes}};
    uint32_t lane = 0;
    uint64_t copy = 0;
    RETURN_IF_ERROR(device->order_after(torch, &lane));
    RETURN_IF_ERROR(device->copy_in(lane, spans, buffer.pinned(), &copy));
    RETURN_IF_ERROR(device->stream_wait(copy, torch));
    RETURN_IF_ERROR(device->order_after(torch, &lane));
    RETURN_IF_ERROR(device->copy_out(lane, spans, buffer.pinned(), &copy));
    RETURN_IF_ERROR(device->stream_wait(copy, torch));
    fake_cuda_settle();  // so that the number of calls is always the same
    RETURN_IF_ERROR(device->wait(copy, kCudaDeadlineNs));
    RETURN_IF_ERROR(device->close());
    RETURN_IF_ERROR(memory.reset());
    return buffer.reset();
  };
  EXPECT_GT(fail_each_call(before, use), 90u);
}

}  // namespace
}  // namespace lightckpt
