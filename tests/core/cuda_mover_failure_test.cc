// Mover, when things go wrong. Goal: an error ends its batch and no other, no wait hangs, and the
// end waits for what is under way. Method: as in cuda_mover_test.cc.
#include <thread>

#include "cuda_mover_helpers.h"

namespace lightckpt {
namespace {

TEST_F(CudaMover, a_batch_that_is_given_up_leaves_the_rest_out) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto mover = ring(&on);
  const uint64_t gate = fake_cuda_gate(torch);
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, spans_of(on), &batch)));
  mover->cancel(batch, {Code::kInvalid, "given up"});
  EXPECT_TRUE(fails(mover->wait(batch, 0), Code::kTimeout, "not finished"))
      << "the device has pieces of it";
  fake_cuda_open(gate);
  EXPECT_TRUE(fails(mover->wait(batch, kCudaDeadlineNs), Code::kInvalid, "given up"));
  EXPECT_EQ(counted().copies, int64_t{kPieces});
  Piece piece;
  EXPECT_TRUE(fails(mover->next(0, &piece), Code::kTimeout, "no piece"));
  mover->cancel(batch, {Code::kInvalid, "again"});
}

TEST_F(CudaMover, a_worker_s_error_ends_its_batch_and_no_other) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto mover = ring(&on);
  for (const Way way : {Way::kOut, Way::kIn}) {
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(submit(mover.get(), on, way, torch, spans_of(on), &batch)));
    Piece piece;
    ASSERT_TRUE(is_ok(mover->next(kCudaDeadlineNs, &piece)));
    mover->finish(piece, {Code::kChanged, "the checksum does not match"});
    fake_cuda_settle();
    while (mover->next(0, &piece).ok()) mover->finish(piece, {});
    EXPECT_TRUE(fails(mover->wait(batch, kCudaDeadlineNs), Code::kChanged, "checksum"));
    EXPECT_TRUE(fails(mover->stream_wait(batch, torch, 0), Code::kChanged, "checksum"));
  }
  uint64_t batch = 0;
  Buffer media(kBytes);
  const Workers workers(mover.get(), &media, {{0, kBytes}}, 1);
  ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, spans_of(on), &batch)));
  EXPECT_TRUE(is_ok(mover->wait(batch, kCudaDeadlineNs)));
}

TEST_F(CudaMover, the_end_waits_for_what_is_under_way) {
  for (const bool failing : {false, true}) {
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const auto mover = ring(&on);
    const uint64_t gate = fake_cuda_gate(torch);
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, spans_of(on), &batch)));
    if (failing) fake_cuda_fail("cuEventQuery", 1, kOutOfMemory);
    std::thread end([&] { EXPECT_EQ(mover->close().ok(), !failing); });
    fake_cuda_settle();
    fake_cuda_open(gate);
    end.join();
    // A piece that went too soon is a misuse, which the end of the test finds.
    EXPECT_EQ(counted().copies, int64_t{kPieces} * (failing ? 2 : 1));
  }
}

// Whether it is lost before a piece has arrived or after.
TEST_F(CudaMover, no_wait_hangs_on_a_lost_context) {
  for (const uint64_t nth : {1, 2, 4}) {
    start({});
    lose_context(nth);
  }
}

TEST_F(CudaMover, every_error_is_returned_and_leaves_nothing) {
  const uint64_t torch = torch_stream();
  std::unique_ptr<CudaContext> context;
  ASSERT_TRUE(is_ok(CudaContext::retain(*driver, 0, &context)));
  const auto before = live();
  const auto use = [&](Way way) -> Status {
    CudaMemory memory;
    std::unique_ptr<CudaDevice> device;
    std::unique_ptr<Mover> mover;
    RETURN_IF_ERROR(make_memory(*context, kBytes, &memory));
    RETURN_IF_ERROR(CudaDevice::open(*context, 2, &device));
    RETURN_IF_ERROR(Mover::make(device.get(), 4 * kPieceBytes, kPieceBytes, &mover));
    const DeviceSpan spans[] = {{memory.get(), 8 * kPieceBytes}};
    uint64_t batch = 0;
    RETURN_IF_ERROR(submit(mover.get(), device.get(), way, torch, spans, nullptr, &batch));
    Piece piece;
    while (mover->wait(batch, 0).code() == Code::kTimeout) {
      fake_cuda_settle();
      if (mover->next(0, &piece).ok()) mover->finish(piece, {});
    }
    RETURN_IF_ERROR(mover->wait(batch, 0));
    RETURN_IF_ERROR(mover->stream_wait(batch, torch, 0));
    fake_cuda_settle();
    RETURN_IF_ERROR(mover->close());
    RETURN_IF_ERROR(device->close());
    return memory.reset();
  };
  for (const Way way : {Way::kOut, Way::kIn}) {
    EXPECT_GT(fail_each_call(before, [&] { return use(way); }), 150u);
  }
}

}  // namespace
}  // namespace lightckpt
