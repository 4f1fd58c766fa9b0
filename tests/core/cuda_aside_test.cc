// Copies aside. Goal: a guard waits for them alone, and who gave memory to be copied aside has it
// back when nothing reads it any more, however its version ended. Method: as in cuda_mover_test.cc
// and cuda_engine_test.cc; a ring whose pieces are taken, so that nothing follows what went aside.
#include <thread>

#include "cuda_engine_helpers.h"
#include "cuda_mover_helpers.h"

namespace lightckpt {
namespace {

// A mover whose ring is full, and a tensor with room aside.
class CudaAside : public CudaMover {
 protected:
  struct Full {
    Full(CudaAside* test, uint64_t stream) : on(*test->driver, 0, kBytes), mover(test->ring(&on)) {
      EXPECT_TRUE(is_ok(make_memory(*on.context, kBytes, &aside)));
      const auto few = spans_of(on, kPieces * kPieceBytes);
      EXPECT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, stream, few, &before)));
      for (Piece& piece : taken) EXPECT_TRUE(is_ok(mover->next(kCudaDeadlineNs, &piece)));
    }
    ~Full() {
      for (const Piece& piece : taken) mover->finish(piece, {});
    }
    Status submit_aside(uint64_t stream, uint64_t* move) {
      uint32_t lane = 0;
      RETURN_IF_ERROR(on->order_after(stream, &lane));
      const CudaPair pairs[] = {{aside.get(), on.memory.get(), 1000},
                                {aside.get() + 1000, on.memory.get() + 1000, kBytes - 1000}};
      const DeviceSpan spans[] = {{aside.get(), kBytes}};
      return mover->submit(Way::kOut, lane, spans, nullptr, pairs, move);
    }

    OneDevice on;
    CudaMemory aside;
    std::unique_ptr<Mover> mover;
    uint64_t before = 0;
    Piece taken[kPieces];
  };
};

TEST_F(CudaAside, a_guard_waits_for_the_copy_aside_alone) {
  const uint64_t torch = torch_stream();
  Full full(this, torch);
  const uint64_t gate = fake_cuda_gate(torch);
  uint64_t move = 0;
  bool updated = false;
  ASSERT_TRUE(is_ok(full.submit_aside(torch, &move)));
  EXPECT_TRUE(is_ok(full.mover->stream_wait(move, torch, 0)));
  launch(torch, [&] { updated = true; });
  fake_cuda_settle();
  EXPECT_FALSE(updated);
  fake_cuda_open(gate);
  fake_cuda_settle();
  EXPECT_TRUE(updated);
  EXPECT_TRUE(fails(full.mover->wait(move, 0), Code::kTimeout)) << "the ring is full";
  full.mover->cancel(move, {Code::kInvalid, "given up"});
  EXPECT_TRUE(fails(full.mover->wait(move, kCudaDeadlineNs), Code::kInvalid, "given up"));
}

TEST_F(CudaAside, a_move_that_is_given_up_is_finished_when_nothing_reads_its_memory) {
  const uint64_t torch = torch_stream();
  Full full(this, torch);
  const uint64_t gate = fake_cuda_gate(torch);
  uint64_t move = 0;
  uint64_t finished = 0;
  ASSERT_TRUE(is_ok(full.submit_aside(torch, &move)));
  full.mover->cancel(move, {Code::kInvalid, "given up"});
  EXPECT_TRUE(fails(full.mover->wait(move, 0), Code::kTimeout)) << "the device still reads it";
  EXPECT_FALSE(full.mover->next_finished(&finished));
  fake_cuda_open(gate);
  EXPECT_TRUE(fails(full.mover->wait(move, kCudaDeadlineNs), Code::kInvalid, "given up"));
  EXPECT_TRUE(full.mover->next_finished(&finished));
  EXPECT_EQ(finished, move);
}

TEST_F(CudaAside, a_copy_aside_that_fails_half_way_is_the_moves_failure) {
  const uint64_t torch = torch_stream();
  Full full(this, torch);
  const uint64_t gate = fake_cuda_gate(torch);
  uint64_t move = 0;
  fake_cuda_fail("cuMemcpyDtoDAsync", 2, kOutOfMemory);
  ASSERT_TRUE(is_ok(full.submit_aside(torch, &move)));
  EXPECT_TRUE(fails(full.mover->wait(move, 0), Code::kTimeout)) << "half of it is under way";
  EXPECT_TRUE(fails(full.mover->stream_wait(move, torch, 0), Code::kNoSpace, "cuMemcpyDtoDAsync"));
  fake_cuda_open(gate);
  EXPECT_TRUE(fails(full.mover->wait(move, kCudaDeadlineNs), Code::kNoSpace, "cuMemcpyDtoDAsync"));
}

TEST_F(CudaAside, a_copy_aside_that_is_not_begun_is_refused) {
  const uint64_t torch = torch_stream();
  Full full(this, torch);
  uint64_t move = 0;
  fake_cuda_fail("cuCtxGetCurrent", 2, kOutOfMemory);  // the first orders the lane
  EXPECT_TRUE(fails(full.submit_aside(torch, &move), Code::kNoSpace, "cuCtxGetCurrent"));
  EXPECT_EQ(move, 0u);
  ASSERT_TRUE(is_ok(full.submit_aside(torch, &move)));
  full.mover->cancel(move, {Code::kInvalid, "given up"});
  EXPECT_TRUE(fails(full.mover->wait(move, kCudaDeadlineNs), Code::kInvalid, "given up"));
}

// The next version may have other tensors, and needs more memory aside.
TEST_F(CudaEngine, a_dropped_version_is_left_when_its_copies_aside_are_done) {
  start({.refuse_registration = 801});  // CUDA_ERROR_NOT_SUPPORTED: all goes through the ring
  const uint64_t streams[] = {torch_stream(), torch_stream(), torch_stream()};
  TestEngine engine(2, Granularity::kVolatile, 64 << 20);
  ASSERT_TRUE(is_ok(open(&engine)));
  auto first = std::make_unique<Tensors>(*driver, kSizes);
  const Tensors read_into(*driver, kSizes);
  const State states[] = {State::of(1, kSizes), State::of(2, {7 << 20, 5000})};
  first->take(states[0]);
  uint64_t batch = 0;
  uint64_t commit = 0;
  ASSERT_TRUE(is_ok(engine.begin(states[0])));
  ASSERT_TRUE(is_ok(write(&engine, Snapshot::kDevice, streams[0], *first, &batch)));
  ASSERT_TRUE(is_ok(engine->queue_commit(states[0].host, &commit)));
  ASSERT_TRUE(is_ok(engine.wait(commit)));

  const uint64_t read_gate = fake_cuda_gate(streams[0]);
  const uint64_t write_gate = fake_cuda_gate(streams[1]);
  uint64_t read = 0;
  const uint64_t version = engine.latest().slot.version;
  const std::vector<Span> one = {read_into.spans()[0]};
  ASSERT_TRUE(is_ok(engine->submit_on({0, streams[0]}, Op::kRead, version, one, &read)));
  ASSERT_TRUE(is_ok(engine->stream_wait(read, streams[0], kDeadlineNs)));  // it has the piece
  ASSERT_TRUE(is_ok(engine.begin(states[0])));
  ASSERT_TRUE(is_ok(write(&engine, Snapshot::kDevice, streams[1], *first, &batch)));
  EXPECT_TRUE(fails(engine->drop(0), Code::kTimeout));
  EXPECT_TRUE(fails(engine.poll(batch), Code::kTimeout)) << "the device still reads it";
  EXPECT_TRUE(fails(engine.begin(states[1]), Code::kInvalid, "in flight"));
  fake_cuda_open(write_gate);
  EXPECT_TRUE(fails(engine.wait(batch), Code::kInvalid, "given up"));
  // A copy that came later than this would be a misuse, which the end of the test finds.
  first.reset();

  const Tensors second(*driver, states[1].sizes());
  second.take(states[1]);
  const int64_t allocated = counted().device_allocations;
  ASSERT_TRUE(is_ok(engine.begin(states[1])));
  ASSERT_TRUE(is_ok(write(&engine, Snapshot::kDevice, streams[2], second, &batch)));
  EXPECT_EQ(counted().device_allocations, allocated) << "the smaller memory aside was kept";
  ASSERT_TRUE(is_ok(engine->queue_commit(states[1].host, &commit)));
  fake_cuda_open(read_gate);
  ASSERT_TRUE(is_ok(engine.wait(commit)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), states[1]));
  EXPECT_TRUE(is_ok(engine.wait(read)));
}

TEST_F(CudaEngine, what_was_given_up_reads_no_memory_when_its_batch_is_done) {
  for (const Snapshot how : kAll) {
    start({});
    const uint64_t torch = torch_stream();
    TestEngine engine(2, Granularity::kVolatile, 32 << 20);
    ASSERT_TRUE(is_ok(open(&engine)));
    auto tensors = std::make_unique<Tensors>(*driver, kSizes);
    const uint64_t gate = fake_cuda_gate(torch);
    uint64_t batch = 0;
    uint64_t check = 0;
    ASSERT_TRUE(is_ok(engine.begin(State::of(1, kSizes))));
    ASSERT_TRUE(is_ok(write(&engine, how, torch, *tensors, &batch)));
    ASSERT_TRUE(is_ok(submit(&engine, Op::kCheck, 0, how, torch, *tensors, &check)));
    EXPECT_TRUE(fails(engine->drop(0), Code::kTimeout));
    EXPECT_TRUE(fails(engine.poll(batch), Code::kTimeout));
    EXPECT_TRUE(fails(engine.poll(check), Code::kTimeout));
    fake_cuda_open(gate);
    EXPECT_TRUE(fails(engine.wait(batch), Code::kInvalid, "given up"));
    EXPECT_NE(engine.wait(check).code(), Code::kTimeout);
    tensors.reset();
  }
}

}  // namespace
}  // namespace lightckpt
