// An engine with a GPU, when things go wrong. Goal: what is given up, refused or lost leaves the
// store as it was, nothing under way, and the engine fit to go on. Method: as in
// cuda_engine_test.cc, with the driver's calls failing one after the other.
#include <thread>

#include "cuda_engine_helpers.h"

namespace lightckpt {
namespace {

TEST_F(CudaEngine, what_is_given_up_leaves_nothing_under_way) {
  for (const Snapshot how : kAll) {
    start({});
    const uint64_t torch = torch_stream();
    TestEngine engine(2, Granularity::kVolatile, 32 << 20);
    ASSERT_TRUE(is_ok(open(&engine)));
    const Tensors tensors(*driver, kSizes);
    const State state = State::of(1, kSizes);
    const uint64_t gate = fake_cuda_gate(torch);
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(engine.begin(state)));
    ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
    EXPECT_TRUE(fails(engine->drop(0), Code::kTimeout)) << "the device has some of it";
    EXPECT_TRUE(fails(engine.begin(state), Code::kInvalid, "in flight"));
    fake_cuda_open(gate);
    EXPECT_FALSE(engine.wait(batch).ok());
    launch(torch, [&] { tensors.take(state); });
    uint64_t commit = 0;
    ASSERT_TRUE(is_ok(engine.begin(state)));
    ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
    ASSERT_TRUE(is_ok(engine->stream_wait(batch, torch, kDeadlineNs)));
    ASSERT_TRUE(is_ok(engine->queue_commit(state.host, &commit)));
    ASSERT_TRUE(is_ok(engine.wait(commit)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  }
}

// The device writes into the mapping until it is through: an end that did not wait is a misuse.
TEST_F(CudaEngine, the_end_waits_for_what_is_under_way) {
  for (const Snapshot how : kAll) {
    start({});
    const uint64_t torch = torch_stream();
    auto engine = std::make_unique<TestEngine>(2, Granularity::kVolatile, 32 << 20);
    ASSERT_TRUE(is_ok(open(engine.get())));
    const Tensors tensors(*driver, kSizes);
    const uint64_t gate = fake_cuda_gate(torch);
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(engine->begin(State::of(1, kSizes))));
    ASSERT_TRUE(is_ok(write(engine.get(), how, torch, tensors, &batch)));
    std::thread end([&] { engine.reset(); });
    fake_cuda_settle();
    fake_cuda_open(gate);
    end.join();
  }
}

TEST_F(CudaEngine, a_store_that_cuda_refuses_is_reached_through_the_ring) {
  start({.refuse_registration = 801});  // CUDA_ERROR_NOT_SUPPORTED
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  DeviceInfo info;
  ASSERT_TRUE(is_ok(open(&engine, &info)));
  EXPECT_TRUE(fails(info.direct, Code::kIo, "cuMemHostRegister"));
  EXPECT_EQ(info.ring_bytes, kRing);
  EXPECT_NE(info.name, "");
  const Tensors tensors(*driver, kSizes);
  const State state = State::of(1, kSizes);
  tensors.take(state);
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(engine.begin(state)));
  EXPECT_TRUE(fails(write(&engine, Snapshot::kDirect, torch, tensors, &batch), Code::kIo,
                    "cuMemHostRegister"));
  for (const Snapshot how : {Snapshot::kDevice, Snapshot::kHost}) {
    ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch)));
  }
  ASSERT_TRUE(is_ok(engine.commit(state)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

// msync does not hear of what a device writes into a file's pages.
TEST_F(CudaEngine, a_plain_file_is_reached_through_the_ring) {
  TestEngine engine(1, Granularity::kPage, 32 << 20);
  DeviceInfo info;
  ASSERT_TRUE(is_ok(open(&engine, &info)));
  EXPECT_TRUE(fails(info.direct, Code::kIo, "plain file"));
  EXPECT_EQ(counted().registrations, 0);
}

TEST_F(CudaEngine, a_check_that_cannot_be_made_keeps_the_version_from_being_one) {
  start({.copies_singly = 1});
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  ASSERT_TRUE(is_ok(open(&engine)));
  const Tensors tensors(*driver, kSizes);
  const State state = State::of(1, kSizes);
  tensors.take(state);
  uint64_t batch = 0;
  uint64_t check = 0;
  uint64_t commit = 0;
  ASSERT_TRUE(is_ok(engine.begin(state)));
  ASSERT_TRUE(is_ok(write(&engine, Snapshot::kDirect, torch, tensors, &batch)));
  ASSERT_TRUE(is_ok(engine.wait(batch)));
  fake_cuda_fail("cuMemcpyDtoHAsync", 1, kOutOfMemory);
  ASSERT_TRUE(is_ok(submit(&engine, Op::kCheck, 0, Snapshot::kHost, torch, tensors, &check)));
  EXPECT_FALSE(engine.wait(check).ok());
  EXPECT_FALSE(engine->stream_wait(check, torch, 0).ok()) << "its failure was not told";
  ASSERT_TRUE(is_ok(engine->queue_commit(state.host, &commit)));
  EXPECT_TRUE(fails(engine.wait(commit), Code::kIo, "could not be checked"));
  EXPECT_EQ(engine.listed(), "");
}

// A check may arrive while a write of the host's is under way: it is finished when that is.
TEST_F(CudaEngine, a_check_waits_for_a_write_of_the_host) {
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  ASSERT_TRUE(is_ok(open(&engine)));
  const Tensors tensors(*driver, {1000, 1000});
  const State state = State::of(1, {1000, 1000});
  tensors.take(state);
  Gate gate(at_copy);
  uint64_t on_device = 0;
  uint64_t on_host = 0;
  uint64_t check = 0;
  uint64_t commit = 0;
  ASSERT_TRUE(is_ok(engine.begin(state)));
  ASSERT_TRUE(is_ok(engine->submit_on({0, torch, Snapshot::kDirect}, Op::kWrite, 0,
                                      std::vector<Span>{tensors.spans()[0]}, &on_device)));
  ASSERT_TRUE(is_ok(engine.wait(on_device)));
  engine.media->set_trace(&gate);
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {spans_of(state)[1]}, &on_host)));
  ASSERT_TRUE(gate.wait_held());
  ASSERT_TRUE(is_ok(
      engine->submit_on({0, torch}, Op::kCheck, 0, std::vector<Span>{tensors.spans()[0]}, &check)));
  Report report;
  for (const auto start = std::chrono::steady_clock::now(); report.bytes < 1000;) {
    EXPECT_TRUE(fails(engine->wait(check, 1'000'000, &report), Code::kTimeout));
    ASSERT_LT(std::chrono::steady_clock::now() - start, kDeadline) << "it has not arrived";
  }
  gate.open();
  ASSERT_TRUE(is_ok(engine.wait(on_host)));
  EXPECT_TRUE(is_ok(engine.wait(check)));
  ASSERT_TRUE(is_ok(engine->queue_commit(state.host, &commit)));
  EXPECT_TRUE(is_ok(engine.wait(commit)));
  engine.media->set_trace(nullptr);
}

TEST_F(CudaEngine, a_store_that_grows_is_reached_as_far_as_it_does) {
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 32 << 20);
  ASSERT_TRUE(is_ok(open(&engine)));
  for (uint64_t step = 1; step <= 3; ++step) {
    const std::vector<uint64_t> sizes = {step * (2 << 20), 100};
    const Tensors tensors(*driver, sizes);
    const State state = State::of(step, sizes);
    tensors.take(state);
    const uint64_t before = engine.media->size();
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(engine.begin(state)));
    EXPECT_GT(engine.media->size(), before);
    ASSERT_TRUE(is_ok(write(&engine, Snapshot::kDirect, torch, tensors, &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch)));
    ASSERT_TRUE(is_ok(engine.commit(state)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  }
  EXPECT_EQ(counted().registrations, 4);
  EXPECT_EQ(fake_cuda_calls("cuMemHostUnregister"), 0u);
}

TEST_F(CudaEngine, what_makes_no_sense_is_refused) {
  const uint64_t torch = torch_stream();
  TestEngine engine(1, Granularity::kVolatile, 32 << 20);
  const Tensors tensors(*driver, kSizes);
  uint64_t batch = 0;
  EXPECT_TRUE(fails(open(&engine, nullptr, 7), Code::kNotFound));
  ASSERT_TRUE(is_ok(engine.begin(State::of(1, kSizes))));
  EXPECT_TRUE(fails(write(&engine, Snapshot::kHost, torch, tensors, &batch), Code::kInvalid,
                    "device 0 has not been opened"));
  ASSERT_TRUE(is_ok(open(&engine)));
  EXPECT_TRUE(fails(submit(&engine, Op::kVerify, 0, Snapshot::kHost, torch, tensors, &batch),
                    Code::kInvalid, "to verify"));
  EXPECT_TRUE(fails(engine->stream_wait(77, torch, 0), Code::kNotFound, "never submitted"));
  fake_cuda_capture(torch, 1);
  EXPECT_TRUE(fails(write(&engine, Snapshot::kHost, torch, tensors, &batch), Code::kBusy, "graph"));
  fake_cuda_capture(torch, 0);
  EXPECT_TRUE(is_ok(write(&engine, Snapshot::kHost, torch, tensors, &batch)));
  EXPECT_TRUE(is_ok(engine.wait(batch)));
  EXPECT_TRUE(is_ok(engine->stream_wait(batch, torch, 0))) << "of a batch that is done";
}

// Whichever call it is: the version is refused or whole, and the next one is made.
TEST_F(CudaEngine, a_call_that_fails_costs_one_version_at_most) {
  for (const Snapshot how : kAll) {
    uint64_t calls = 0;
    for (uint64_t nth = 1; calls == 0; ++nth) {
      start({.seed = nth, .delay_us_max = 0});
      const uint64_t torch = torch_stream();
      TestEngine engine(2, Granularity::kCacheLine, 2 << 20);
      ASSERT_TRUE(is_ok(open(&engine)));
      const std::vector<uint64_t> sizes = {100'000, 100, 100};
      const Tensors tensors(*driver, sizes);
      const auto save = [&](uint64_t step) -> Status {
        const State state = State::of(step, sizes);
        tensors.take(state);
        uint64_t batch = 0;
        uint64_t commit = 0;
        RETURN_IF_ERROR(engine.begin(state));
        Status status = write(&engine, how, torch, tensors, &batch);
        if (status.ok()) status = engine->stream_wait(batch, torch, kDeadlineNs);
        if (status.ok()) status = engine.wait(batch);
        if (status.ok()) status = engine->queue_commit(state.host, &commit);
        if (status.ok()) status = engine.wait(commit);
        fake_cuda_settle();
        if (!status.ok()) (void)engine->drop(kDeadlineNs);
        if (status.ok()) {
          EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
        }
        return status;
      };
      ASSERT_TRUE(is_ok(save(1)));
      fake_cuda_fail(nullptr, nth, kOutOfMemory);
      const Status status = save(2);
      if (fake_cuda_unfail() != 0) calls = nth;
      if (!status.ok()) {
        EXPECT_TRUE(fails(status, Code::kNoSpace, "OUT_OF_MEMORY")) << nth;
      }
      EXPECT_TRUE(is_ok(save(3))) << "call " << nth;
      if (HasFailure()) return;
    }
    EXPECT_GT(calls, 15u);
  }
}

}  // namespace
}  // namespace lightckpt
