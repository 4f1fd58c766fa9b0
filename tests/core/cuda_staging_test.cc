// Staging. Goal: what goes through the ring is what the device had at the boundary, or gets there
// before the guard lets the next reader on; the ring is all the pinned memory there is; an error
// ends its batch, and no wait hangs. Method: as in cuda_device_test.cc, with workers that copy
// pieces on, or that a test leaves out.
#include <atomic>
#include <thread>

#include "cuda_helpers.h"
#include "staging.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 40'000;
constexpr uint64_t kPieceBytes = 4096;
constexpr uint64_t kPieces = 4;

// Workers between a staging and a media that is plain memory: span i begins at `starts[i]`.
class Workers {
 public:
  Workers(Staging* staging, Buffer* media, std::vector<uint64_t> starts, int count) {
    for (int i = 0; i < count; ++i) {
      threads_.emplace_back([=, this] {
        while (!stopping_) {
          StagedPiece piece;
          if (!staging->next(1'000'000, &piece).ok()) continue;
          std::byte* const at = media->data() + starts[piece.span] + piece.offset;
          std::byte* const target = piece.way == Way::kOut ? at : piece.memory;
          const std::byte* const source = piece.way == Way::kOut ? piece.memory : at;
          std::memcpy(target, source, piece.bytes);
          staging->finish(piece, {});
        }
      });
    }
  }
  ~Workers() {
    stopping_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> stopping_ = false;
  std::vector<std::thread> threads_;
};

class CudaStaging : public FakeCuda {
 protected:
  std::unique_ptr<Staging> ring(OneDevice* on) {
    std::unique_ptr<Staging> staging;
    EXPECT_TRUE(
        is_ok(Staging::make(on->device.get(), kPieces * kPieceBytes, kPieceBytes, &staging)));
    return staging;
  }
  void lose_context(uint64_t nth) {
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const auto staging = ring(&on);
    const uint64_t gate = fake_cuda_gate(torch);  // so that each piece is asked for
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, spans_of(on), &batch)));
    fake_cuda_open(gate);
    fake_cuda_settle();  // where a device is lost nothing goes on
    fake_cuda_fail("cuEventQuery", nth, 700);
    EXPECT_TRUE(fails(staging->wait(batch, kCudaDeadlineNs), Code::kIo, "ILLEGAL_ADDRESS"));
    EXPECT_FALSE(staging->submit(Way::kOut, torch, spans_of(on), &batch).ok());
    EXPECT_FALSE(on.device->close().ok());
  }
  static std::vector<DeviceSpan> spans_of(const OneDevice& on, uint64_t bytes = kBytes) {
    return {{on.memory.get(), bytes}};
  }
};

TEST_F(CudaStaging, a_batch_larger_than_the_ring_goes_through_it) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    start({.seed = seed});
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const auto staging = ring(&on);
    const Buffer bytes = random_bytes(kBytes, seed);
    launch(torch, [&] { std::ranges::copy(bytes, on.tensor().begin()); });
    Buffer media(kBytes);
    const Workers workers(staging.get(), &media, {0, 10'001, 10'001}, 2);
    const DeviceSpan spans[] = {{on.memory.get(), 10'001},
                                {on.memory.get() + 10'001, 0},
                                {on.memory.get() + 10'001, kBytes - 10'001}};
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, spans, &batch)));
    ASSERT_TRUE(is_ok(staging->stream_wait(batch, torch, kCudaDeadlineNs)));
    launch(torch, [&] { on.fill(0); });
    ASSERT_TRUE(is_ok(staging->wait(batch, kCudaDeadlineNs)));
    EXPECT_EQ(media, bytes) << "seed " << seed;
    // And back, by the same ring.
    ASSERT_TRUE(is_ok(staging->submit(Way::kIn, torch, spans, &batch)));
    ASSERT_TRUE(is_ok(staging->stream_wait(batch, torch, kCudaDeadlineNs)));
    bool same = false;
    launch(torch, [&] { same = std::ranges::equal(on.tensor(), bytes); });
    ASSERT_TRUE(is_ok(staging->wait(batch, kCudaDeadlineNs)));
    fake_cuda_settle();
    EXPECT_TRUE(same) << "seed " << seed;
  }
}

TEST_F(CudaStaging, the_ring_is_all_there_is) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto staging = ring(&on);
  const int64_t pinned = counted().host_allocations;
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, spans_of(on), &batch)));
  fake_cuda_settle();
  EXPECT_EQ(counted().copies, int64_t{kPieces});
  std::vector<StagedPiece> pieces(kPieces);
  for (StagedPiece& piece : pieces) ASSERT_TRUE(is_ok(staging->next(kCudaDeadlineNs, &piece)));
  StagedPiece other;
  EXPECT_TRUE(fails(staging->next(0, &other), Code::kTimeout, "no piece"));
  EXPECT_TRUE(fails(staging->wait(batch, 0), Code::kTimeout, "not finished"));
  // One comes back: one more follows.
  staging->finish(pieces[0], {});
  fake_cuda_settle();
  EXPECT_EQ(counted().copies, int64_t{kPieces} + 1);
  ASSERT_TRUE(is_ok(staging->next(kCudaDeadlineNs, &other)));
  EXPECT_EQ(other.offset, kPieces * kPieceBytes);
  EXPECT_EQ(other.memory, pieces[0].memory);
  for (uint64_t i = 1; i < kPieces; ++i) staging->finish(pieces[i], {});
  staging->finish(other, {});
  for (uint64_t at = (kPieces + 1) * kPieceBytes; at < kBytes; at += kPieceBytes) {
    ASSERT_TRUE(is_ok(staging->next(kCudaDeadlineNs, &other)));
    EXPECT_EQ(other.offset, at);
    staging->finish(other, {});
  }
  EXPECT_TRUE(is_ok(staging->wait(batch, 0)));
  EXPECT_EQ(counted().host_allocations, pinned);
}

TEST_F(CudaStaging, the_guard_waits_on_the_host_only_for_what_is_larger_than_the_ring) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto staging = ring(&on);
  const uint64_t gate = fake_cuda_gate(torch);
  Buffer media(kBytes);
  uint64_t small = 0;
  uint64_t large = 0;
  bool updated = false;
  const auto few = spans_of(on, kPieces * kPieceBytes);
  ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, few, &small)));
  EXPECT_TRUE(is_ok(staging->stream_wait(small, torch, 0)));
  launch(torch, [&] { updated = true; });
  ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, spans_of(on), &large)));
  EXPECT_TRUE(fails(staging->stream_wait(large, torch, 0), Code::kTimeout, "not all pieces"));
  fake_cuda_settle();
  EXPECT_FALSE(updated);
  fake_cuda_open(gate);
  const Workers workers(staging.get(), &media, {0}, 1);
  EXPECT_TRUE(is_ok(staging->stream_wait(large, torch, kCudaDeadlineNs)));
  EXPECT_TRUE(is_ok(staging->wait(large, kCudaDeadlineNs)));
  fake_cuda_settle();
  EXPECT_TRUE(updated);
}

TEST_F(CudaStaging, of_many_steps_each_batch_is_of_one) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    start({.seed = seed, .delay_us_max = 100});
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes, 1 + seed % 3);
    const auto staging = ring(&on);
    Buffer media(kBytes);
    const Workers workers(staging.get(), &media, {0}, 2);
    for (int step = 0; step < 20; ++step) {
      uint64_t batch = 0;
      launch(torch, [&on, step] { on.fill(step); });
      ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, spans_of(on), &batch)));
      ASSERT_TRUE(is_ok(staging->stream_wait(batch, torch, kCudaDeadlineNs)));
      launch(torch, [&on] { on.fill(0xff); });
      ASSERT_TRUE(is_ok(staging->wait(batch, kCudaDeadlineNs)));
      EXPECT_TRUE(all_are(media, step)) << "step " << step << ", seed " << seed;
    }
  }
}

// The test of the test: a driver whose streams do not wait lets the ring take what is not there
// yet.
TEST_F(CudaStaging, without_waits_pieces_come_too_early) {
  start({.ignore_waits = 1});
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto staging = ring(&on);
  const uint64_t gate = fake_cuda_gate(torch);
  launch(torch, [&] { on.fill(1); });
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, spans_of(on, kPieceBytes), &batch)));
  StagedPiece piece;
  EXPECT_TRUE(is_ok(staging->next(kCudaDeadlineNs, &piece)));
  EXPECT_TRUE(all_are(std::span(piece.memory, piece.bytes), 0));
  staging->finish(piece, {});
  fake_cuda_open(gate);
  fake_cuda_settle();
}

TEST_F(CudaStaging, both_ways_at_once_do_not_starve_each_other) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  OneDevice other(*driver, 0, kBytes);
  const auto staging = ring(&on);
  Buffer media = random_bytes(2 * kBytes, 1);
  const Buffer before = media;
  const Workers workers(staging.get(), &media, {0, kBytes}, 2);
  std::vector<uint64_t> batches(20);
  on.fill(7);
  for (size_t i = 0; i < batches.size(); ++i) {
    // Out of one tensor to the first half; into the other from the second half.
    const DeviceSpan out[] = {{on.memory.get(), kBytes}};
    const DeviceSpan in[] = {{other.memory.get(), 0}, {other.memory.get(), kBytes}};
    const bool outward = i % 2 == 0;
    const auto spans = outward ? std::span<const DeviceSpan>(out) : std::span<const DeviceSpan>(in);
    ASSERT_TRUE(is_ok(staging->submit(outward ? Way::kOut : Way::kIn, torch, spans, &batches[i])));
    // On other lanes another batch of the same memory may be under way.
    ASSERT_TRUE(is_ok(staging->stream_wait(batches[i], torch, kCudaDeadlineNs)));
  }
  for (const uint64_t batch : batches) ASSERT_TRUE(is_ok(staging->wait(batch, kCudaDeadlineNs)));
  EXPECT_TRUE(all_are(std::span(media).first(kBytes), 7));
  EXPECT_TRUE(std::ranges::equal(other.tensor(), std::span(before).subspan(kBytes)));
}

TEST_F(CudaStaging, batches_and_reports_are_bounded) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto staging = ring(&on);
  const uint64_t gate = fake_cuda_gate(torch);
  std::vector<uint64_t> batches(Staging::kBatchesMax);
  const auto spans = spans_of(on, 1);
  for (uint64_t& batch : batches) {
    ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, spans, &batch)));
  }
  uint64_t more = 0;
  EXPECT_TRUE(fails(staging->submit(Way::kOut, torch, spans, &more), Code::kBusy, "256 batches"));
  fake_cuda_open(gate);
  Buffer media(1);
  {
    const Workers workers(staging.get(), &media, {0}, 1);
    for (const uint64_t batch : batches) ASSERT_TRUE(is_ok(staging->wait(batch, kCudaDeadlineNs)));
  }
  ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, {}, &more)));
  EXPECT_TRUE(is_ok(staging->wait(more, 0))) << "an empty batch is finished at once";
  EXPECT_TRUE(fails(staging->wait(batches[0], 0), Code::kInvalid, "too old"));
}

TEST_F(CudaStaging, a_worker_s_error_ends_its_batch_and_no_other) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto staging = ring(&on);
  for (const Way way : {Way::kOut, Way::kIn}) {
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(staging->submit(way, torch, spans_of(on), &batch)));
    StagedPiece piece;
    ASSERT_TRUE(is_ok(staging->next(kCudaDeadlineNs, &piece)));
    staging->finish(piece, {Code::kChanged, "the checksum does not match"});
    fake_cuda_settle();
    while (staging->next(0, &piece).ok()) staging->finish(piece, {});
    EXPECT_TRUE(fails(staging->wait(batch, kCudaDeadlineNs), Code::kChanged, "checksum"));
    EXPECT_TRUE(fails(staging->stream_wait(batch, torch, 0), Code::kChanged, "checksum"));
  }
  uint64_t batch = 0;
  Buffer media(kBytes);
  const Workers workers(staging.get(), &media, {0}, 1);
  ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, spans_of(on), &batch)));
  EXPECT_TRUE(is_ok(staging->wait(batch, kCudaDeadlineNs)));
}

TEST_F(CudaStaging, the_end_waits_for_what_is_under_way) {
  for (const bool failing : {false, true}) {
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const auto staging = ring(&on);
    const uint64_t gate = fake_cuda_gate(torch);
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(staging->submit(Way::kOut, torch, spans_of(on), &batch)));
    if (failing) fake_cuda_fail("cuEventQuery", 1, kOutOfMemory);
    std::thread end([&] { EXPECT_EQ(staging->close().ok(), !failing); });
    fake_cuda_settle();
    fake_cuda_open(gate);
    end.join();
    // A piece that went too soon is a misuse, which the end of the test finds.
    EXPECT_EQ(counted().copies, int64_t{kPieces} * (failing ? 2 : 1));
  }
}

// Whether it is lost before a piece has arrived or after.
TEST_F(CudaStaging, no_wait_hangs_on_a_lost_context) {
  for (const uint64_t nth : {1, 2, 4}) {
    start({});
    lose_context(nth);
  }
}

TEST_F(CudaStaging, every_error_is_returned_and_leaves_nothing) {
  const uint64_t torch = torch_stream();
  std::unique_ptr<CudaContext> context;
  ASSERT_TRUE(is_ok(CudaContext::retain(*driver, 0, &context)));
  const auto before = live();
  const auto use = [&](Way way) -> Status {
    CudaMemory memory;
    std::unique_ptr<CudaDevice> device;
    std::unique_ptr<Staging> staging;
    RETURN_IF_ERROR(make_memory(*context, kBytes, &memory));
    RETURN_IF_ERROR(CudaDevice::open(*context, 2, &device));
    RETURN_IF_ERROR(Staging::make(device.get(), 4 * kPieceBytes, kPieceBytes, &staging));
    const DeviceSpan spans[] = {{memory.get(), 8 * kPieceBytes}};
    uint64_t batch = 0;
    RETURN_IF_ERROR(staging->submit(way, torch, spans, &batch));
    StagedPiece piece;
    while (staging->wait(batch, 0).code() == Code::kTimeout) {
      fake_cuda_settle();
      if (staging->next(0, &piece).ok()) staging->finish(piece, {});
    }
    RETURN_IF_ERROR(staging->wait(batch, 0));
    RETURN_IF_ERROR(staging->stream_wait(batch, torch, 0));
    fake_cuda_settle();
    RETURN_IF_ERROR(staging->close());
    RETURN_IF_ERROR(device->close());
    return memory.reset();
  };
  for (const Way way : {Way::kOut, Way::kIn}) {
    EXPECT_GT(fail_each_call(before, [&] { return use(way); }), 150u);
  }
}

}  // namespace
}  // namespace lightckpt
