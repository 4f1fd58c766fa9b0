// Memory aside, and submitting. See gpu.h.
#include "gpu.h"

#include <algorithm>
#include <exception>

namespace lightckpt {
namespace {

constexpr uint64_t kAsideAlign = 256;

uint64_t aligned(uint64_t bytes) { return (bytes + kAsideAlign - 1) / kAsideAlign * kAsideAlign; }

}  // namespace

Status Gpu::open(const CudaDriver& driver, int ordinal, uint64_t ring_bytes, int64_t patience_ns,
                 Upkeep* upkeep, std::unique_ptr<Gpu>* gpu) {
  std::unique_ptr<Gpu> made(new Gpu(patience_ns, upkeep));
  const uint64_t wanted = ring_bytes == 0 ? kRingBytes : ring_bytes;
  made->ring_bytes_ = (wanted + kPieceBytes - 1) / kPieceBytes * kPieceBytes;
  RETURN_IF_ERROR(CudaContext::retain(driver, ordinal, &made->context_));
  RETURN_IF_ERROR(CudaDevice::open(*made->context_, kLanes, &made->device_));
  RETURN_IF_ERROR(Mover::make(made->device_.get(), made->ring_bytes_, kPieceBytes, &made->mover_));
  *gpu = std::move(made);
  return {};
}

void Gpu::close() {
  mover_.reset();
  device_.reset();
}

void Gpu::begin() {
  MutexLock lock(aside_mutex_);
  next_aside_ = 0;
  aside_until_ = Deadline(patience_ns_);
}

Status Gpu::take_aside(std::span<const DeviceSpan> spans, CudaPointer* aside) {
  uint64_t bytes = 0;
  for (const DeviceSpan& span : spans) bytes += aligned(span.bytes);
  *aside = 0;
  if (bytes == 0) return {};
  size_t index = 0;
  Deadline until(0);
  {
    MutexLock lock(aside_mutex_);
    if (next_aside_ == asides_.size()) asides_.emplace_back();
    index = next_aside_++;
    Aside& taken = asides_[index];
    if (taken.asked_for) return {};  // since an attempt before, which did wait for it
    if (taken.bytes >= bytes) {
      *aside = taken.memory.get();
      return {};
    }
    taken.asked_for = true;
    until = aside_until_;
  }
  bool came = false;
  try {
    came = upkeep_->run([this, index, bytes] { bring_aside(index, bytes); }, until);
  } catch (const std::exception&) {
    MutexLock lock(aside_mutex_);
    asides_[index].asked_for = false;
    throw;
  }
  if (!came) return {};
  MutexLock lock(aside_mutex_);
  if (asides_[index].status.ok()) *aside = asides_[index].memory.get();
  return asides_[index].status;
}

// On upkeep's thread. What was there goes first: nothing uses it, and there may be no room for
// both.
void Gpu::bring_aside(size_t index, uint64_t bytes) {
  CudaMemory memory;
  {
    MutexLock lock(aside_mutex_);
    memory = std::move(asides_[index].memory);
    asides_[index].bytes = 0;
  }
  Status status;
  try {
    (void)memory.reset();
    status = make_memory(*context_, bytes, &memory);
  } catch (const std::exception&) {
    status = no_host_memory();
  }
  if (!status.ok()) (void)memory.reset();
  MutexLock lock(aside_mutex_);
  Aside& aside = asides_[index];
  aside.asked_for = false;
  if (status.ok()) {
    aside.memory = std::move(memory);
    aside.bytes = bytes;
  }
  aside.status = std::move(status);
}

Status Gpu::submit(Way way, uint64_t stream, std::span<const DeviceSpan> spans,
                   const CudaPinned* places, CudaPointer aside, uint64_t* move) {
  std::vector<DeviceSpan> here(spans.begin(), spans.end());
  std::vector<CudaPair> pairs;
  if (aside != 0) pairs.reserve(here.size());
  for (DeviceSpan& span : here) {
    if (aside == 0) break;
    pairs.push_back({aside, span.device, span.bytes});
    span.device = aside;
    aside += aligned(span.bytes);
  }
  uint32_t lane = 0;
  RETURN_IF_ERROR(device_->order_after(stream, &lane));
  return mover_->submit(way, lane, here, places, pairs, move);
}

}  // namespace lightckpt
