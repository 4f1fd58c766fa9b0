// What the feed does beside copies. Goal: no version waits for what CUDA takes its time with,
// registering and allocating, nor does that wait for copies; a GPU that cannot reach the media has
// the ring, whatever the others can; the registration ends last. Method: as in cuda_engine_test.cc;
// calls on memory that wait for a stream at a gate, while another one goes on.
#include <thread>

#include "cuda_engine_helpers.h"

namespace lightckpt {
namespace {

constexpr int64_t kShortNs = 20'000'000;  // what it waits for is held until it has passed

class CudaFeed : public CudaEngine {
 protected:
  static testing::AssertionResult comes(const std::function<bool()>& event) {
    const auto until = std::chrono::steady_clock::now() + kDeadline;
    while (!event()) {
      if (std::chrono::steady_clock::now() > until) return testing::AssertionFailure();
      std::this_thread::yield();
    }
    return testing::AssertionSuccess();
  }
  // Of all the tensors' bytes, down to the slot.
  Status save(TestEngine* engine, Snapshot how, uint64_t stream, const Tensors& tensors,
              const State& state, Report* report) {
    tensors.take(state);
    uint64_t batch = 0;
    RETURN_IF_ERROR(engine->begin(state));
    RETURN_IF_ERROR(write(engine, how, stream, tensors, &batch));
    RETURN_IF_ERROR(engine->wait(batch, report));
    return engine->commit(state);
  }
};

TEST_F(CudaFeed, no_version_waits_for_what_has_grown_to_be_registered) {
  const uint64_t held = torch_stream();
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  ASSERT_TRUE(is_ok(open(&engine, nullptr, 0, kShortNs)));
  ASSERT_TRUE(comes([] { return counted().registrations == 1; }));
  const Tensors tensors(*driver, kSizes);
  const uint64_t gate = fake_cuda_gate(held);
  memory_waits();
  Report report;
  for (uint64_t step = 1; step <= 2; ++step) {
    const State state = State::of(step, kSizes);
    ASSERT_TRUE(is_ok(save(&engine, Snapshot::kDirect, torch, tensors, state, &report)));
    EXPECT_FALSE(report.in_place);
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  }
  fake_cuda_open(gate);
  ASSERT_TRUE(comes([] { return counted().registrations == 2; }));
  const State state = State::of(3, kSizes);
  // The part is known a moment after CUDA has it.
  ASSERT_TRUE(comes([&] {
    EXPECT_TRUE(is_ok(save(&engine, Snapshot::kDirect, torch, tensors, state, &report)));
    return report.in_place;
  }));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  EXPECT_EQ(fake_cuda_calls("cuMemHostRegister"), 2u);
  EXPECT_EQ(fake_cuda_calls("cuMemHostUnregister"), 0u);
}

TEST_F(CudaFeed, a_store_grows_while_copies_in_place_are_under_way) {
  const uint64_t held = torch_stream();
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 64 << 20);
  ASSERT_TRUE(is_ok(open(&engine)));
  const Tensors small(*driver, kSizes);
  const std::vector<uint64_t> sizes = {9 << 20, 1000};
  const Tensors large(*driver, sizes);
  const State states[] = {State::of(1, kSizes), State::of(2, sizes)};
  Report report;
  ASSERT_TRUE(is_ok(save(&engine, Snapshot::kDirect, torch, small, states[0], &report)));
  EXPECT_TRUE(report.in_place);
  const uint64_t gate = fake_cuda_gate(held);
  uint64_t read = 0;
  const uint64_t version = engine.latest().slot.version;
  small.fill(0xee);
  ASSERT_TRUE(is_ok(submit(&engine, Op::kRead, version, Snapshot::kDirect, held, small, &read)));
  const uint64_t before = engine.media->size();
  ASSERT_TRUE(is_ok(save(&engine, Snapshot::kDirect, torch, large, states[1], &report)));
  EXPECT_GT(engine.media->size(), before);
  EXPECT_TRUE(report.in_place);
  EXPECT_TRUE(holds(engine.store(), engine.latest(), states[1]));
  EXPECT_TRUE(fails(engine.poll(read), Code::kTimeout));
  fake_cuda_open(gate);
  EXPECT_TRUE(is_ok(engine.wait(read)));
  EXPECT_TRUE(small.holds(states[0]));
}

// What was free at the old end and what has grown behind it are one area.
TEST_F(CudaFeed, an_extent_may_lie_across_the_old_end) {
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  ASSERT_TRUE(is_ok(open(&engine)));
  const uint64_t end = engine.media->size();
  const Tensors tensors(*driver, {600'000});
  const State state = State::of(1, {600'000});
  Report report;
  ASSERT_TRUE(is_ok(save(&engine, Snapshot::kDirect, torch, tensors, state, &report)));
  const Version version = engine.latest();
  const uint64_t begin = version.slot.record_offset + version.layout->extent_offsets[0];
  ASSERT_LT(begin, end);
  ASSERT_GT(begin + 600'000, end);
  EXPECT_TRUE(report.in_place);
  EXPECT_TRUE(holds(engine.store(), version, state));
}

TEST_F(CudaFeed, no_version_waits_for_memory_aside) {
  const uint64_t held = torch_stream();
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  ASSERT_TRUE(is_ok(open(&engine, nullptr, 0, kShortNs)));
  const Tensors tensors(*driver, kSizes);
  const int64_t allocated = counted().device_allocations;
  const uint64_t gate = fake_cuda_gate(held);
  memory_waits();
  Report report;
  for (uint64_t step = 1; step <= 2; ++step) {
    const State state = State::of(step, kSizes);
    ASSERT_TRUE(is_ok(save(&engine, Snapshot::kDevice, torch, tensors, state, &report)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  }
  EXPECT_EQ(fake_cuda_calls("cuMemcpyDtoDAsync"), 0u);
  fake_cuda_open(gate);
  ASSERT_TRUE(comes([&] { return counted().device_allocations == allocated + 1; }));
  const State state = State::of(3, kSizes);
  ASSERT_TRUE(comes([&] {
    EXPECT_TRUE(is_ok(save(&engine, Snapshot::kDevice, torch, tensors, state, &report)));
    return fake_cuda_calls("cuMemcpyDtoDAsync") > 0;
  }));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  EXPECT_EQ(counted().device_allocations, allocated + 1);
}

TEST_F(CudaFeed, a_gpu_that_does_not_take_host_addresses_has_the_ring) {
  const uint64_t torch = torch_stream();
  fake_cuda_attribute(0, 91, 0);
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  DeviceInfo info;
  ASSERT_TRUE(is_ok(open(&engine, &info)));
  EXPECT_TRUE(fails(info.direct, Code::kIo, "attribute 91 is 0"));
  const Tensors tensors(*driver, kSizes);
  const State state = State::of(1, kSizes);
  Report report;
  EXPECT_TRUE(fails(save(&engine, Snapshot::kDirect, torch, tensors, state, &report), Code::kIo,
                    "attribute 91 is 0"));
  EXPECT_TRUE(is_ok(engine->drop(kDeadlineNs)));
  for (const Snapshot how : {Snapshot::kHost, Snapshot::kDevice}) {
    ASSERT_TRUE(is_ok(save(&engine, how, torch, tensors, state, &report)));
    EXPECT_FALSE(report.in_place);
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  }
  EXPECT_EQ(fake_cuda_calls("cuMemHostRegister"), 0u);
}

// The first one cannot: then it is the second that registers, and reaches the media.
TEST_F(CudaFeed, each_gpu_is_asked_what_it_can) {
  start({.devices = 2});
  const uint64_t streams[] = {torch_stream(0), torch_stream(1)};
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  DeviceInfo first;
  DeviceInfo second;
  fake_cuda_fail("cuDeviceGetAttribute", 1, 999);
  ASSERT_TRUE(is_ok(open(&engine, &first, 0)));
  ASSERT_TRUE(is_ok(open(&engine, &second, 1)));
  EXPECT_TRUE(fails(first.direct, Code::kIo, "cuDeviceGetAttribute"));
  EXPECT_TRUE(is_ok(second.direct));
  const State state = State::of(1, kSizes);
  const Tensors tensors[] = {Tensors(*driver, kSizes, 0), Tensors(*driver, kSizes, 1)};
  ASSERT_TRUE(is_ok(engine.begin(state)));
  for (int device = 0; device < 2; ++device) {
    tensors[device].take(state);
    uint64_t batch = 0;
    Report report;
    ASSERT_TRUE(is_ok(submit(&engine, Op::kWrite, 0, Snapshot::kDevice, streams[device],
                             tensors[device], &batch, device)));
    ASSERT_TRUE(is_ok(engine.wait(batch, &report)));
    EXPECT_EQ(report.in_place, device == 1);
  }
  ASSERT_TRUE(is_ok(engine.commit(state)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

// The first GPU has registered the media, and the second writes there: without its engine, which
// would wait for its batches first.
TEST_F(CudaFeed, the_registration_ends_behind_the_copies_of_all) {
  start({.devices = 2});
  const uint64_t torch = torch_stream(1);
  (void)torch_stream(0);
  const auto store = heap_store(64 << 20);
  auto feed = std::make_unique<DeviceFeed>();
  DeviceInfo info;
  for (const int device : {0, 1}) {
    ASSERT_TRUE(is_ok(feed->open(*driver, device, {kRing, kDeadlineNs}, store.get(), &info)));
    ASSERT_TRUE(is_ok(info.direct));
  }
  const Tensors tensors(*driver, kSizes, 1);
  Attempt attempt;
  ASSERT_TRUE(is_ok(begin(store.get(), State::of(1, kSizes), 1, &attempt)));
  Batch batch;
  batch.on_device = true;
  ASSERT_TRUE(is_ok(batch.cut(*attempt.layout, attempt.slot.record_offset, tensors.spans())));
  const uint64_t gate = fake_cuda_gate(torch);
  ASSERT_TRUE(is_ok(feed->submit({1, torch, Snapshot::kDirect}, store->media(), &batch)));
  const uint64_t asked = fake_cuda_calls("cuEventQuery");
  std::thread end([&] { feed.reset(); });
  EXPECT_TRUE(comes([&] { return fake_cuda_calls("cuEventQuery") > asked; }))
      << "it does not wait for the second";
  EXPECT_EQ(fake_cuda_calls("cuMemHostUnregister"), 0u);
  fake_cuda_open(gate);
  end.join();
}

}  // namespace
}  // namespace lightckpt
