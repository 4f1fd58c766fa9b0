// What a driver may do, and the core has to bear. Goal: none of it costs a version, hangs a call,
// or goes unnoticed. Method: the fake driver under its rules (see cuda_fake_test.cc, which shows
// that it keeps them), with streams at gates; what is left queued or was not allowed fails at a
// test's end. Each test here fails when the care that it is about is taken out of the core.
#include <cstdlib>
#include <functional>
#include <thread>

#include "cuda_engine_helpers.h"
#include "file_media.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 40'000;

class CudaRules : public CudaEngine {
 protected:
  // Copies go in batches where a driver takes any.
  void SetUp() override {
    setenv("LIGHTCKPT_CUDA_BATCH", "1", 1);
    CudaEngine::SetUp();
  }
  void TearDown() override {
    CudaEngine::TearDown();
    unsetenv("LIGHTCKPT_CUDA_BATCH");
  }
  void restart(const FakeCudaRules& rules, const FakeCudaOptions& options = {}) {
    start(options);
    fake_cuda_rules(&rules);
  }

  // Does it return while a stream stands at the gate? That is opened in any case.
  static bool returns_at_gate(uint64_t gate, const std::function<void()>& call) {
    Signal returned;
    std::thread caller([&] {
      call();
      returned.set();
    });
    const bool in_time = returned.wait();
    fake_cuda_open(gate);
    caller.join();
    return in_time;
  }

  // The tensor's bytes, in many small spans, behind what the stream has.
  static void copy_out(OneDevice* on, uint64_t stream) {
    const Buffer bytes = random_bytes(kBytes, stream + 1);
    std::ranges::copy(bytes, on->tensor().begin());
    std::vector<CudaSpan> spans;
    for (uint64_t at = 0; at < kBytes; at += 400) spans.push_back({on->memory.get() + at, at, 400});
    uint32_t lane = 0;
    uint64_t copy = 0;
    ASSERT_TRUE(is_ok((*on)->order_after(stream, &lane)));
    ASSERT_TRUE(is_ok((*on)->copy_out(lane, spans, on->buffer.pinned(), &copy)));
    ASSERT_TRUE(is_ok((*on)->wait(copy, kCudaDeadlineNs)));
    EXPECT_TRUE(std::ranges::equal(bytes, on->host()));
    EXPECT_GE(fake_cuda_calls("cuMemcpyBatchAsync"), 1u);
    EXPECT_EQ(fake_cuda_calls("cuMemcpyDtoHAsync"), 0u);
  }
};

// A batch on the legacy stream is refused: ours are on streams of our own, whatever torch's is.
TEST_F(CudaRules, batches_go_on_no_legacy_stream) {
  for (const uint64_t stream : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{3}}) {
    start({});
    const uint64_t torch = torch_stream();
    std::thread([&] {
      fake_cuda_set_device(0);
      OneDevice on(*driver, 0, kBytes);
      copy_out(&on, stream == 3 ? torch : stream);
    }).join();
  }
}

// Drivers of CUDA 12.8 and 12.9 have the batch with an argument more.
TEST_F(CudaRules, a_driver_of_cuda_12_copies_in_batches) {
  ASSERT_TRUE(is_ok(CudaDriver::load(FAKE_CUDA_12, &driver)));
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  copy_out(&on, torch);
}

// Such a copy may wait for the device, and a batch of such is refused.
TEST_F(CudaRules, no_copy_is_out_of_pageable_memory_or_into_it) {
  const std::vector<uint64_t> sizes(50, 3000);
  for (const int refuse : {0, 801}) {
    for (const Snapshot how : {Snapshot::kHost, Snapshot::kDevice}) {
      restart({.pageable_blocks = 1}, {.refuse_registration = refuse});
      const uint64_t torch = torch_stream();
      TestEngine engine(2, Granularity::kVolatile, 32 << 20);
      ASSERT_TRUE(is_ok(open(&engine)));
      const Tensors tensors(*driver, sizes);
      const State state = State::of(1, sizes);
      tensors.take(state);
      ASSERT_TRUE(is_ok(engine.begin(state)));
      uint64_t batch = 0;
      uint64_t commit = 0;
      ASSERT_TRUE(returns_at_gate(fake_cuda_gate(torch), [&] {
        EXPECT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
        EXPECT_TRUE(is_ok(engine->stream_wait(batch, torch, kDeadlineNs)));
      }));
      ASSERT_TRUE(is_ok(engine->queue_commit(state.host, &commit)));
      ASSERT_TRUE(is_ok(engine.wait(commit)));
      EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
    }
  }
}

// Behind the file's end address space is reserved, with nothing in it.
TEST_F(CudaRules, of_a_mapping_only_what_is_mapped_is_registered) {
  if (!std::filesystem::is_directory("/dev/shm")) GTEST_SKIP() << "no /dev/shm";
  const TempFolder folder(memory_folder());
  const uint64_t torch = torch_stream();
  std::unique_ptr<Media> media;
  std::unique_ptr<Store> store;
  ASSERT_TRUE(
      is_ok(FileMedia::create(folder.file("store"), MediaKind::kTmpfs, 512 * 1024, &media)));
  ASSERT_TRUE(is_ok(Store::open(std::move(media), {}, true, &store)));
  Engine engine(std::move(store), 2);
  DeviceInfo info;
  ASSERT_TRUE(is_ok(engine.open_device(*driver, 0, {kRing}, &info)));
  EXPECT_TRUE(is_ok(info.direct));
  for (uint64_t step = 1; step <= 3; ++step) {
    const std::vector<uint64_t> sizes = {step * 1'000'000, 100};
    const Tensors tensors(*driver, sizes);
    const State state = State::of(step, sizes);
    tensors.take(state);
    uint64_t batch = 0;
    Report report;
    ASSERT_TRUE(is_ok(engine.begin(step, 1, sizes, state.blob, state.host.size())));
    ASSERT_TRUE(is_ok(
        engine.submit_on({0, torch, Snapshot::kDirect}, Op::kWrite, 0, tensors.spans(), &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch, kDeadlineNs, &report)));
    ASSERT_TRUE(is_ok(engine.queue_commit(state.host, &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch, kDeadlineNs, &report)));
    EXPECT_TRUE(holds(&engine.store(), engine.store().versions().front(), state));
  }
}

// What the mapping was registered for stays so until the device is through, though the store grows.
TEST_F(CudaRules, a_read_in_place_keeps_its_memory_while_the_store_grows) {
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  ASSERT_TRUE(is_ok(open(&engine)));
  const std::vector<uint64_t> sizes = {200'000};
  const std::vector<uint64_t> larger = {8 << 20};
  const Tensors tensors(*driver, sizes);
  const State state = State::of(1, sizes);
  const State next = State::of(2, larger);
  ASSERT_TRUE(is_ok(engine.save(state)));
  const uint64_t gate = fake_cuda_gate(torch);
  const uint64_t version = engine.latest().slot.version;
  const uint64_t before = engine.media->size();
  uint64_t read = 0;
  ASSERT_TRUE(is_ok(submit(&engine, Op::kRead, version, Snapshot::kDirect, torch, tensors, &read)));
  ASSERT_TRUE(is_ok(engine->stream_wait(read, torch, kDeadlineNs)));  // the device has all of it
  std::thread grower([&] { EXPECT_TRUE(is_ok(engine.begin(next))); });
  while (engine.media->size() == before) std::this_thread::yield();
  fake_cuda_open(gate);
  grower.join();
  EXPECT_TRUE(is_ok(engine.wait(read)));
  EXPECT_TRUE(tensors.holds(state));
}

// Whether it is captured cannot be asked then, and every use would break that capture.
TEST_F(CudaRules, the_legacy_stream_is_left_alone_while_a_blocking_one_is_captured) {
  (void)torch_stream();
  const uint64_t blocking = fake_cuda_blocking_stream(0);
  OneDevice on(*driver, 0, kBytes);
  uint64_t first = 0;
  uint64_t other = 0;
  ASSERT_TRUE(is_ok(on.copy_out(0, &first)));
  fake_cuda_capture(blocking, 1);
  EXPECT_TRUE(fails(on.copy_out(0, &other), Code::kBusy, "CUDA graph"));
  EXPECT_TRUE(fails(on->stream_wait(first, 0), Code::kBusy, "CUDA graph"));
  EXPECT_TRUE(is_ok(on->wait(first, kCudaDeadlineNs)));
  fake_cuda_capture(blocking, 0);
  EXPECT_TRUE(is_ok(on.copy_out(0, &other)));
  EXPECT_TRUE(is_ok(on->wait(other, kCudaDeadlineNs)));
}

}  // namespace
}  // namespace lightckpt
