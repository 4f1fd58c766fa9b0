// Mover. Goal: what goes through the ring, or has its place, is what the device had at the
// boundary, or gets there before the guard lets the next reader on; the ring is all the pinned
// memory there is. Method: as in cuda_device_test.cc, with workers that copy pieces on, or that a
// test leaves out.
#include <random>

#include "cuda_mover_helpers.h"

namespace lightckpt {
namespace {

TEST_F(CudaMover, a_batch_larger_than_the_ring_goes_through_it) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    start({.seed = seed});
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const auto mover = ring(&on);
    const Buffer bytes = random_bytes(kBytes, seed);
    launch(torch, [&] { std::ranges::copy(bytes, on.tensor().begin()); });
    Buffer media(kBytes);
    const Workers workers(mover.get(), &media, {{0, 10'001}, {10'001, 0}, {10'001, kBytes}}, 2);
    const DeviceSpan spans[] = {{on.memory.get(), 10'001},
                                {on.memory.get() + 10'001, 0},
                                {on.memory.get() + 10'001, kBytes - 10'001}};
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, spans, &batch)));
    ASSERT_TRUE(is_ok(mover->stream_wait(batch, torch, kCudaDeadlineNs)));
    launch(torch, [&] { on.fill(0); });
    ASSERT_TRUE(is_ok(mover->wait(batch, kCudaDeadlineNs)));
    EXPECT_EQ(media, bytes) << "seed " << seed;
    // And back, by the same ring.
    ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kIn, torch, spans, &batch)));
    ASSERT_TRUE(is_ok(mover->stream_wait(batch, torch, kCudaDeadlineNs)));
    bool same = false;
    launch(torch, [&] { same = std::ranges::equal(on.tensor(), bytes); });
    ASSERT_TRUE(is_ok(mover->wait(batch, kCudaDeadlineNs)));
    fake_cuda_settle();
    EXPECT_TRUE(same) << "seed " << seed;
  }
}

TEST_F(CudaMover, the_ring_is_all_there_is) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto mover = ring(&on);
  const int64_t pinned = counted().host_allocations;
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, spans_of(on), &batch)));
  fake_cuda_settle();
  EXPECT_EQ(counted().copies, int64_t{kPieces});
  std::vector<Piece> pieces(kPieces);
  for (Piece& piece : pieces) ASSERT_TRUE(is_ok(mover->next(kCudaDeadlineNs, &piece)));
  Piece other;
  EXPECT_TRUE(fails(mover->next(0, &other), Code::kTimeout, "no piece"));
  EXPECT_TRUE(fails(mover->wait(batch, 0), Code::kTimeout, "not finished"));
  // One comes back: one more follows.
  mover->finish(pieces[0], {});
  fake_cuda_settle();
  EXPECT_EQ(counted().copies, int64_t{kPieces} + 1);
  ASSERT_TRUE(is_ok(mover->next(kCudaDeadlineNs, &other)));
  EXPECT_EQ(other.offset, kPieces * kPieceBytes);
  EXPECT_EQ(other.memory, pieces[0].memory);
  for (uint64_t i = 1; i < kPieces; ++i) mover->finish(pieces[i], {});
  mover->finish(other, {});
  for (uint64_t at = (kPieces + 1) * kPieceBytes; at < kBytes; at += kPieceBytes) {
    ASSERT_TRUE(is_ok(mover->next(kCudaDeadlineNs, &other)));
    EXPECT_EQ(other.offset, at);
    mover->finish(other, {});
  }
  EXPECT_TRUE(is_ok(mover->wait(batch, 0)));
  EXPECT_EQ(counted().host_allocations, pinned);
}

TEST_F(CudaMover, the_guard_waits_on_the_host_only_for_what_is_larger_than_the_ring) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto mover = ring(&on);
  const uint64_t gate = fake_cuda_gate(torch);
  Buffer media(kBytes);
  uint64_t small = 0;
  uint64_t large = 0;
  bool updated = false;
  const auto few = spans_of(on, kPieces * kPieceBytes);
  ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, few, &small)));
  EXPECT_TRUE(is_ok(mover->stream_wait(small, torch, 0)));
  launch(torch, [&] { updated = true; });
  ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, spans_of(on), &large)));
  EXPECT_TRUE(fails(mover->stream_wait(large, torch, 0), Code::kTimeout, "not all pieces"));
  fake_cuda_settle();
  EXPECT_FALSE(updated);
  fake_cuda_open(gate);
  const Workers workers(mover.get(), &media, {{0, kBytes}}, 1);
  EXPECT_TRUE(is_ok(mover->stream_wait(large, torch, kCudaDeadlineNs)));
  EXPECT_TRUE(is_ok(mover->wait(large, kCudaDeadlineNs)));
  fake_cuda_settle();
  EXPECT_TRUE(updated);
}

TEST_F(CudaMover, of_many_steps_each_batch_is_of_one) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    start({.seed = seed, .delay_us_max = 100});
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes, 1 + seed % 3);
    const auto mover = ring(&on);
    Buffer media(kBytes);
    const Workers workers(mover.get(), &media, {{0, kBytes}}, 2);
    for (int step = 0; step < 20; ++step) {
      uint64_t batch = 0;
      launch(torch, [&on, step] { on.fill(step); });
      ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, spans_of(on), &batch)));
      ASSERT_TRUE(is_ok(mover->stream_wait(batch, torch, kCudaDeadlineNs)));
      launch(torch, [&on] { on.fill(0xff); });
      ASSERT_TRUE(is_ok(mover->wait(batch, kCudaDeadlineNs)));
      EXPECT_TRUE(all_are(media, step)) << "step " << step << ", seed " << seed;
    }
  }
}

// The test of the test: a driver whose streams do not wait lets the ring take what is not there
// yet.
TEST_F(CudaMover, without_waits_pieces_come_too_early) {
  start({.ignore_waits = 1});
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto mover = ring(&on);
  const uint64_t gate = fake_cuda_gate(torch);
  launch(torch, [&] { on.fill(1); });
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, spans_of(on, kPieceBytes), &batch)));
  Piece piece;
  EXPECT_TRUE(is_ok(mover->next(kCudaDeadlineNs, &piece)));
  EXPECT_TRUE(all_are(std::span(piece.memory, piece.bytes), 0));
  mover->finish(piece, {});
  fake_cuda_open(gate);
  fake_cuda_settle();
}

TEST_F(CudaMover, both_ways_at_once_do_not_starve_each_other) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  OneDevice other(*driver, 0, kBytes);
  const auto mover = ring(&on);
  Buffer media = random_bytes(2 * kBytes, 1);
  const Buffer before = media;
  const Workers workers(mover.get(), &media, {{0, kBytes}, {kBytes, kBytes}}, 2);
  std::vector<uint64_t> batches(20);
  on.fill(7);
  for (size_t i = 0; i < batches.size(); ++i) {
    // Out of one tensor to the first half; into the other from the second half.
    const DeviceSpan out[] = {{on.memory.get(), kBytes}};
    const DeviceSpan in[] = {{other.memory.get(), 0}, {other.memory.get(), kBytes}};
    const bool outward = i % 2 == 0;
    const auto spans = outward ? std::span<const DeviceSpan>(out) : std::span<const DeviceSpan>(in);
    ASSERT_TRUE(
        is_ok(submit(mover.get(), on, outward ? Way::kOut : Way::kIn, torch, spans, &batches[i])));
    // On other lanes another batch of the same memory may be under way.
    ASSERT_TRUE(is_ok(mover->stream_wait(batches[i], torch, kCudaDeadlineNs)));
  }
  for (const uint64_t batch : batches) ASSERT_TRUE(is_ok(mover->wait(batch, kCudaDeadlineNs)));
  EXPECT_TRUE(all_are(std::span(media).first(kBytes), 7));
  EXPECT_TRUE(std::ranges::equal(other.tensor(), std::span(before).subspan(kBytes)));
}

// Hundreds of small tensors: few pieces, so few events, and each byte in its place.
TEST_F(CudaMover, small_spans_share_a_piece) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    start({.seed = seed});
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const auto mover = ring(&on);
    const Buffer bytes = random_bytes(kBytes, seed);
    std::ranges::copy(bytes, on.tensor().begin());
    std::mt19937_64 random(seed);
    std::vector<Home> homes;
    std::vector<DeviceSpan> spans;
    for (uint64_t at = 0; at < kBytes;) {
      const uint64_t size =
          std::min<uint64_t>(random() % 200 == 0 ? 9000 : random() % 130, kBytes - at);
      homes.push_back({at, size});
      spans.push_back({on.memory.get() + at, size});
      at += size;
    }
    for (const Way way : {Way::kOut, Way::kIn}) {
      Buffer media = way == Way::kOut ? Buffer(kBytes) : bytes;
      const uint64_t copies = fake_cuda_calls("cuEventRecord");
      if (way == Way::kIn) on.fill(0);
      {
        const Workers workers(mover.get(), &media, homes, 2);
        uint64_t batch = 0;
        ASSERT_TRUE(is_ok(submit(mover.get(), on, way, torch, spans, &batch)));
        ASSERT_TRUE(is_ok(mover->wait(batch, kCudaDeadlineNs)));
      }
      EXPECT_LT(fake_cuda_calls("cuEventRecord") - copies, spans.size() / 8) << spans.size();
      EXPECT_TRUE(std::ranges::equal(on.tensor(), bytes)) << "seed " << seed;
      EXPECT_EQ(media, bytes) << "seed " << seed;
    }
  }
}

// Copy engines reach the media itself: what the workers get lies there already, and what they let
// go on is fetched from there.
TEST_F(CudaMover, pieces_in_place_need_no_ring) {
  constexpr uint64_t kLarge = 3 * Mover::kPlaceBytes + 12'345;
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kLarge);
  const auto mover = ring(&on);
  const Buffer bytes = random_bytes(kLarge, 1);
  std::ranges::copy(bytes, on.tensor().begin());
  const CudaPinned places = on.buffer.pinned();
  const DeviceSpan spans[] = {{on.memory.get(), 100, places.memory},
                              {on.memory.get() + 100, kLarge - 100, places.memory + 100}};
  for (const Way way : {Way::kOut, Way::kIn}) {
    const uint64_t gate = fake_cuda_gate(torch);
    if (way == Way::kIn) on.fill(0);
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(submit(mover.get(), on.device.get(), way, torch, spans, &places, &batch)));
    // The guard of a copy out does not wait on the host, however large the batch.
    if (way == Way::kOut) {
      EXPECT_TRUE(is_ok(mover->stream_wait(batch, torch, 0)));
    }
    fake_cuda_open(gate);
    uint64_t got = 0;
    Piece piece;
    while (got < kLarge) {
      ASSERT_TRUE(is_ok(mover->next(kCudaDeadlineNs, &piece)));
      EXPECT_TRUE(piece.in_place);
      EXPECT_EQ(piece.memory, nullptr);
      got += piece.bytes;
      mover->finish(piece, {});
    }
    ASSERT_TRUE(is_ok(mover->wait(batch, kCudaDeadlineNs)));
    uint64_t finished = 0;
    EXPECT_TRUE(mover->next_finished(&finished));
    EXPECT_EQ(finished, batch);
    EXPECT_FALSE(mover->next_finished(&finished));
    EXPECT_TRUE(std::ranges::equal(on.host(), bytes));
    EXPECT_TRUE(std::ranges::equal(on.tensor(), bytes));
  }
}

TEST_F(CudaMover, batches_and_reports_are_bounded) {
  const uint64_t torch = torch_stream();
  OneDevice on(*driver, 0, kBytes);
  const auto mover = ring(&on);
  const uint64_t gate = fake_cuda_gate(torch);
  std::vector<uint64_t> batches(Mover::kMovesMax);
  const auto spans = spans_of(on, 1);
  for (uint64_t& batch : batches) {
    ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, spans, &batch)));
  }
  uint64_t more = 0;
  EXPECT_TRUE(
      fails(submit(mover.get(), on, Way::kOut, torch, spans, &more), Code::kBusy, "2048 moves"));
  fake_cuda_open(gate);
  Buffer media(1);
  {
    const Workers workers(mover.get(), &media, {{0, kBytes}}, 1);
    for (const uint64_t batch : batches) ASSERT_TRUE(is_ok(mover->wait(batch, kCudaDeadlineNs)));
  }
  ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, {}, &more)));
  EXPECT_TRUE(is_ok(mover->wait(more, 0))) << "an empty batch is finished at once";
  EXPECT_TRUE(fails(mover->wait(batches[0], 0), Code::kInvalid, "too old"));
}

}  // namespace
}  // namespace lightckpt
