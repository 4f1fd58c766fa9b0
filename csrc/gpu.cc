// Choosing the way, and copying aside. See gpu.h.
#include "gpu.h"

#include <algorithm>

namespace lightckpt {
namespace {

constexpr uint64_t kAsideAlign = 256;

uint64_t aligned(uint64_t bytes) { return (bytes + kAsideAlign - 1) / kAsideAlign * kAsideAlign; }

}  // namespace

Status Gpu::open(const CudaDriver& driver, int ordinal, uint64_t ring_bytes, const Gpu* first,
                 std::unique_ptr<Gpu>* gpu) {
  std::unique_ptr<Gpu> made(new Gpu());
  if (first != nullptr) made->first_ = first;
  const uint64_t wanted = ring_bytes == 0 ? kRingBytes : ring_bytes;
  made->ring_bytes_ = (wanted + kPieceBytes - 1) / kPieceBytes * kPieceBytes;
  RETURN_IF_ERROR(CudaContext::retain(driver, ordinal, &made->context_));
  RETURN_IF_ERROR(CudaDevice::open(*made->context_, kLanes, &made->device_));
  RETURN_IF_ERROR(Mover::make(made->device_.get(), made->ring_bytes_, kPieceBytes, &made->mover_));
  *gpu = std::move(made);
  return {};
}

Gpu::~Gpu() {
  mover_.reset();
  // Waits for what is under way: only then may the memory go that it is under way to.
  device_.reset();
}

Status Gpu::cover(std::byte* memory, uint64_t bytes) {
  const CudaPinned now = registration_.pinned();
  if (now.memory == memory && now.bytes >= bytes) return reach_;
  // In one go: a copy must not cross from one registration into another.
  (void)registration_.reset();
  reach_ = CudaRegistration::make(*context_, memory, bytes, false, &registration_);
  return reach_;
}

Status Gpu::begin() {
  if (next_aside_ == 0) return {};
  RETURN_IF_ERROR(device_->join_lanes());
  next_aside_ = 0;
  return {};
}

Status Gpu::submit(Way way, Snapshot how, uint64_t stream, std::span<const DeviceSpan> spans,
                   Moved* moved) {
  *moved = {};
  if (how == Snapshot::kDirect && !reach().ok()) return reach();
  const CudaPinned places = first_->registration_.pinned();
  uint32_t lane = 0;
  RETURN_IF_ERROR(device_->order_after(stream, &lane));
  if (how != Snapshot::kDevice || way == Way::kIn) {
    const bool in_place = how != Snapshot::kHost && reach().ok();
    return mover_->submit(way, lane, spans, in_place ? &places : nullptr, &moved->move);
  }
  std::vector<DeviceSpan> aside(spans.begin(), spans.end());
  Status status = copy_aside(lane, &aside, &moved->aside);
  if (status.ok()) {
    status = mover_->submit(way, lane, aside, reach().ok() ? &places : nullptr, &moved->move);
  }
  // The memory aside is used again by the next attempt, which would not know of this.
  if (!status.ok() && moved->aside != 0) (void)device_->wait(moved->aside, -1);
  return status;
}

// Copies the spans to memory of our own, and lets them name that.
Status Gpu::copy_aside(uint32_t lane, std::vector<DeviceSpan>* spans, uint64_t* copy) {
  uint64_t bytes = 0;
  for (const DeviceSpan& span : *spans) bytes += aligned(span.bytes);
  if (next_aside_ == asides_.size()) asides_.emplace_back();
  Aside& aside = asides_[next_aside_];
  if (aside.bytes < bytes) {
    (void)aside.memory.reset();
    aside.bytes = 0;
    RETURN_IF_ERROR(make_memory(*context_, bytes, &aside.memory));
    aside.bytes = bytes;
  }
  ++next_aside_;
  std::vector<CudaPair> pairs;
  pairs.reserve(spans->size());
  CudaPointer at = aside.memory.get();
  for (DeviceSpan& span : *spans) {
    pairs.push_back({at, span.device, span.bytes});
    span.device = at;
    at += aligned(span.bytes);
  }
  return device_->copy_aside(lane, pairs, copy);
}

Status Gpu::stream_wait(const Moved& moved, uint64_t stream, int64_t timeout_ns) {
  if (moved.aside != 0) return device_->stream_wait(moved.aside, stream);
  return mover_->stream_wait(moved.move, stream, timeout_ns);
}

}  // namespace lightckpt
