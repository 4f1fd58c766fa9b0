// The engine with a GPU. Goal: a version holds what the device had at the boundary, whichever way
// it came, and no thread waits for the device but those that ask to. Method: tensors in the fake
// device's memory, kernels that change them before and after each guard, and streams that are late
// at random or stand at a gate.
#include "cuda_engine_helpers.h"

namespace lightckpt {
namespace {

TEST_F(CudaEngine, a_version_is_what_the_device_had_at_the_boundary) {
  for (const Snapshot how : kAll) {
    for (uint64_t seed = 1; seed <= 2; ++seed) {
      start({.seed = seed});
      const uint64_t torch = torch_stream();
      TestEngine engine(1 + seed % 3, Granularity::kCacheLine, 32 << 20);
      ASSERT_TRUE(is_ok(open(&engine)));
      const Tensors tensors(*driver, kSizes);
      for (uint64_t step = 1; step <= 2; ++step) {
        const State state = State::of(step, kSizes);
        launch(torch, [&] { tensors.take(state); });
        uint64_t batch = 0;
        uint64_t commit = 0;
        ASSERT_TRUE(is_ok(engine.begin(state)));
        ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
        ASSERT_TRUE(is_ok(engine->stream_wait(batch, torch, kDeadlineNs)));
        launch(torch, [&] { tensors.fill(0xff); });
        ASSERT_TRUE(is_ok(engine->queue_commit(state.host, &commit)));
        ASSERT_TRUE(is_ok(engine.wait(commit)));
        EXPECT_TRUE(holds(engine.store(), engine.latest(), state)) << "seed " << seed;
        for (const Op op : {Op::kRead, Op::kCopy}) {
          launch(torch, [&] { tensors.fill(0xee); });
          const uint64_t version = engine.latest().slot.version;
          ASSERT_TRUE(is_ok(submit(&engine, op, version, how, torch, tensors, &batch)));
          ASSERT_TRUE(is_ok(engine.wait(batch)));
          EXPECT_TRUE(tensors.holds(state)) << "seed " << seed;
        }
      }
    }
  }
}

// No thread has waited for the device when all is queued; the version is durable when it has come.
TEST_F(CudaEngine, a_commit_waits_for_what_is_on_its_way) {
  for (const Snapshot how : {Snapshot::kDirect, Snapshot::kDevice}) {
    start({});
    const uint64_t torch = torch_stream();
    TestEngine engine(2, Granularity::kCacheLine, 32 << 20);
    ASSERT_TRUE(is_ok(open(&engine)));
    const Tensors tensors(*driver, kSizes);
    const State state = State::of(1, kSizes);
    const uint64_t gate = fake_cuda_gate(torch);
    launch(torch, [&] { tensors.take(state); });
    uint64_t batch = 0;
    uint64_t check = 0;
    uint64_t commit = 0;
    ASSERT_TRUE(is_ok(engine.begin(state)));
    EXPECT_TRUE(fails(engine->queue_commit(state.host, &commit), Code::kInvalid, "0 of"));
    ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
    ASSERT_TRUE(is_ok(engine->stream_wait(batch, torch, 0)));
    ASSERT_TRUE(is_ok(engine->submit_on({0, torch}, Op::kCheck, 0,
                                        std::vector<Span>{tensors.spans()[2]}, &check)));
    ASSERT_TRUE(is_ok(engine->stream_wait(check, torch, 0)));
    launch(torch, [&] { tensors.fill(0xff); });
    ASSERT_TRUE(is_ok(engine->queue_commit(state.host, &commit)));
    EXPECT_TRUE(fails(engine.poll(commit), Code::kTimeout));
    EXPECT_TRUE(fails(engine->queue_commit(state.host, &commit), Code::kInvalid, "queued already"));
    EXPECT_EQ(engine.listed(), "");
    fake_cuda_open(gate);
    ASSERT_TRUE(is_ok(engine.wait(commit)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
    EXPECT_TRUE(is_ok(engine.wait(check)));
  }
}

TEST_F(CudaEngine, a_check_that_finds_other_bytes_keeps_the_version_from_being_one) {
  for (const Snapshot how : kAll) {
    start({});
    const uint64_t torch = torch_stream();
    TestEngine engine(2, Granularity::kVolatile, 32 << 20);
    ASSERT_TRUE(is_ok(open(&engine)));
    const Tensors tensors(*driver, kSizes);
    for (const bool edited : {true, false}) {
      const State state = State::of(1, kSizes);
      launch(torch, [&] { tensors.take(state); });
      uint64_t batch = 0;
      uint64_t check = 0;
      uint64_t commit = 0;
      ASSERT_TRUE(is_ok(engine.begin(state)));
      ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
      if (edited) {
        ASSERT_TRUE(is_ok(engine.wait(batch)));
        launch(torch, [&] { tensors.at(3)[kChunkBytes] ^= std::byte{1}; });
      }
      ASSERT_TRUE(is_ok(submit(&engine, Op::kCheck, 0, how, torch, tensors, &check)));
      // As guards do: the copies may be on other lanes than those of the check.
      ASSERT_TRUE(is_ok(engine->stream_wait(batch, torch, kDeadlineNs)));
      ASSERT_TRUE(is_ok(engine->stream_wait(check, torch, kDeadlineNs)));
      launch(torch, [&] { tensors.fill(0xff); });
      ASSERT_TRUE(is_ok(engine->queue_commit(state.host, &commit)));
      Report report;
      if (edited) {
        EXPECT_TRUE(fails(engine.wait(commit), Code::kChanged, "dropped"));
        EXPECT_TRUE(fails(engine.wait(check, &report), Code::kChanged));
        EXPECT_EQ(report.bad_count, 1u);
        EXPECT_EQ(report.bad[0], 3u);
        EXPECT_EQ(engine.listed(), "");
      } else {
        EXPECT_TRUE(is_ok(engine.wait(commit)));
        EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
      }
    }
  }
}

// The test of the tests: a driver whose streams do not wait for events lets a version have what was
// there before the boundary's last kernel.
TEST_F(CudaEngine, a_wait_left_out_is_found) {
  for (const Snapshot how : kAll) {
    start({.ignore_waits = 1});
    const uint64_t torch = torch_stream();
    TestEngine engine(2, Granularity::kVolatile, 32 << 20);
    ASSERT_TRUE(is_ok(open(&engine)));
    const Tensors tensors(*driver, kSizes);
    const State before = State::of(1, kSizes);
    tensors.take(before);
    const uint64_t gate = fake_cuda_gate(torch);
    launch(torch, [&] { tensors.fill(0xff); });
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(engine.begin(before)));
    ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch)));
    ASSERT_TRUE(is_ok(engine.commit(before)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), before));
    fake_cuda_open(gate);
  }
}

TEST_F(CudaEngine, two_devices_share_a_version) {
  start({.devices = 2});
  const uint64_t streams[] = {torch_stream(0), torch_stream(1)};
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  const std::vector<uint64_t> sizes = {3 << 20, 5 << 20, 100'000};
  State state = State::of(1, sizes);
  const Tensors first(*driver, sizes, 0);
  const Tensors second(*driver, sizes, 1);
  first.take(state);
  second.take(state);
  uint64_t commit = 0;
  ASSERT_TRUE(is_ok(engine.begin(state)));
  std::vector<uint64_t> batches(3);
  for (int device = 0; device < 2; ++device) {
    ASSERT_TRUE(is_ok(open(&engine, nullptr, device)));
    const Span span = (device == 0 ? first : second).spans()[static_cast<size_t>(device)];
    ASSERT_TRUE(is_ok(engine->submit_on({device, streams[device], Snapshot::kDirect}, Op::kWrite, 0,
                                        std::vector<Span>{span}, &batches[device])));
  }
  const Span host = {state.extents[2].data(), 2, 0};
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {host}, &batches[2])));
  ASSERT_TRUE(is_ok(engine.wait(batches[2])));
  ASSERT_TRUE(is_ok(engine->queue_commit(state.host, &commit)));
  ASSERT_TRUE(is_ok(engine.wait(commit)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

// What the device wrote is flushed and fenced before the slot that makes it a version.
TEST_F(CudaEngine, the_media_hears_of_what_the_device_wrote) {
  const uint64_t torch = torch_stream();
  TestEngine engine(1, Granularity::kCacheLine, 32 << 20);
  ASSERT_TRUE(is_ok(open(&engine)));
  const std::vector<uint64_t> sizes = {2 * kChunkBytes + 5, 300};
  const Tensors tensors(*driver, sizes);
  const State state = State::of(1, sizes);
  tensors.take(state);
  EventLog log;
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(engine.begin(state)));
  engine.media->set_trace(&log);
  ASSERT_TRUE(is_ok(write(&engine, Snapshot::kDirect, torch, tensors, &batch)));
  ASSERT_TRUE(is_ok(engine.wait(batch)));
  engine.media->set_trace(nullptr);
  uint64_t told = 0;
  bool fenced = false;
  for (const auto& event : log.take()) {
    if (event.kind == EventKind::kDmaDone) told += event.bytes;
    fenced = event.kind == EventKind::kFence;
  }
  EXPECT_EQ(told, 2 * kChunkBytes + 305);
  EXPECT_TRUE(fenced) << "the last event is no fence";
  ASSERT_TRUE(is_ok(engine.commit(state)));
}

}  // namespace
}  // namespace lightckpt
