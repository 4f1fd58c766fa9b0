// A mover with a small ring, and workers that copy its pieces on.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_helpers.h"
#include "mover.h"

namespace lightckpt {

inline constexpr uint64_t kBytes = 40'000;
inline constexpr uint64_t kPieceBytes = 4096;
inline constexpr uint64_t kPieces = 4;

// Where a span of a batch lies in the media, which is plain memory.
struct Home {
  uint64_t start;
  uint64_t bytes;
};

// Copies a piece on, part by part.
inline void work_on(const Piece& piece, const std::vector<Home>& homes, Buffer* media) {
  std::byte* staged = piece.memory;
  uint64_t left = piece.bytes;
  for (uint32_t i = 0; i < piece.spans; ++i) {
    const Home& home = homes[piece.span + i];
    const uint64_t offset = i == 0 ? piece.offset : 0;
    const uint64_t bytes = std::min(home.bytes - offset, left);
    std::byte* const at = media->data() + home.start + offset;
    if (!piece.in_place && bytes > 0) {
      std::memcpy(piece.way == Way::kOut ? at : staged, piece.way == Way::kOut ? staged : at,
                  bytes);
    }
    staged += Piece::next_part(bytes);
    left -= bytes;
  }
  EXPECT_EQ(left, 0u);
}

class Workers {
 public:
  Workers(Mover* mover, Buffer* media, std::vector<Home> homes, int count) {
    for (int i = 0; i < count; ++i) {
      threads_.emplace_back([=, this] {
        while (!stopping_) {
          Piece piece;
          if (!mover->next(1'000'000, &piece).ok()) continue;
          work_on(piece, homes, media);
          mover->finish(piece, {});
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

class CudaMover : public FakeCuda {
 protected:
  static Status submit(Mover* mover, CudaDevice* device, Way way, uint64_t stream,
                       std::span<const DeviceSpan> spans, const CudaPinned* places,
                       uint64_t* batch) {
    uint32_t lane = 0;
    RETURN_IF_ERROR(device->order_after(stream, &lane));
    return mover->submit(way, lane, spans, places, {}, batch);
  }
  static Status submit(Mover* mover, OneDevice& on, Way way, uint64_t stream,
                       std::span<const DeviceSpan> spans, uint64_t* batch) {
    return submit(mover, on.device.get(), way, stream, spans, nullptr, batch);
  }
  std::unique_ptr<Mover> ring(OneDevice* on) {
    std::unique_ptr<Mover> mover;
    EXPECT_TRUE(is_ok(Mover::make(on->device.get(), kPieces * kPieceBytes, kPieceBytes, &mover)));
    return mover;
  }
  void lose_context(uint64_t nth) {
    const uint64_t torch = torch_stream();
    OneDevice on(*driver, 0, kBytes);
    const auto mover = ring(&on);
    const uint64_t gate = fake_cuda_gate(torch);  // so that each piece is asked for
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(submit(mover.get(), on, Way::kOut, torch, spans_of(on), &batch)));
    fake_cuda_open(gate);
    fake_cuda_settle();  // where a device is lost nothing goes on
    fake_cuda_fail("cuEventQuery", nth, 700);
    EXPECT_TRUE(fails(mover->wait(batch, kCudaDeadlineNs), Code::kIo, "ILLEGAL_ADDRESS"));
    EXPECT_FALSE(submit(mover.get(), on, Way::kOut, torch, spans_of(on), &batch).ok());
    EXPECT_FALSE(on.device->close().ok());
  }
  static std::vector<DeviceSpan> spans_of(const OneDevice& on, uint64_t bytes = kBytes) {
    return {{on.memory.get(), bytes}};
  }
};

}  // namespace lightckpt
