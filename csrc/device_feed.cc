// Submitting to GPUs, and asking them. See device_feed.h.
#include "device_feed.h"

#include <algorithm>
#include <exception>

#include "deadline.h"

namespace lightckpt {
namespace {

constexpr std::chrono::nanoseconds kGrowTimeout = std::chrono::seconds(60);

// A device writes there, and the media hears of it by dma_done.
std::byte* place_in(const Media& media, uint64_t offset) {
  return const_cast<std::byte*>(media.view()) + offset;
}

std::vector<DeviceSpan> spans_of(const Batch& batch, const Media& media) {
  std::vector<DeviceSpan> spans;
  spans.reserve(batch.span_count());
  for (size_t i = 0; i < batch.span_count(); ++i) {
    const size_t begin = batch.first_of(i), end = batch.first_of(i + 1);
    DeviceSpan span = {0, 0, nullptr};
    for (size_t at = begin; at < end; ++at) span.bytes += batch.chunks[at].bytes;
    if (span.bytes > 0) {
      span.device = cuda_pointer(batch.chunks[begin].memory);
      span.place = place_in(media, batch.chunks[begin].offset);
    }
    spans.push_back(span);
  }
  return spans;
}

}  // namespace

Status DeviceFeed::open(const CudaDriver& driver, int ordinal, uint64_t ring_bytes,
                        const Media& media, DeviceInfo* info) {
  MutexLock lock(mutex_);
  Gpu* gpu = find(ordinal);
  if (gpu == nullptr) {
    const Gpu* const first = gpus_.empty() ? nullptr : gpus_.front().get();
    std::unique_ptr<Gpu> opened;
    RETURN_IF_ERROR(Gpu::open(driver, ordinal, ring_bytes, first, &opened));
    if (first == nullptr && media.granularity() == Granularity::kPage) {
      opened->keep_off({Code::kIo,
                        "the store is a plain file: msync does not hear of what a GPU "
                        "writes"});
    } else if (first == nullptr) {
      (void)opened->cover(place_in(media, 0), media.size());
    }
    gpu = opened.get();
    gpus_.push_back(std::move(opened));
  }
  RETURN_IF_ERROR(driver.device_name(ordinal, &info->name));
  RETURN_IF_ERROR(driver.version(&info->driver_version));
  info->ring_bytes = gpu->ring_bytes();
  info->direct = gpu->reach();
  return {};
}

Gpu* DeviceFeed::find(int ordinal) const {
  for (const auto& gpu : gpus_) {
    if (gpu->ordinal() == ordinal) return gpu.get();
  }
  return nullptr;
}

Status DeviceFeed::check_open(int ordinal) const {
  MutexLock lock(mutex_);
  if (find(ordinal) != nullptr) return {};
  return {Code::kInvalid, "device " + std::to_string(ordinal) + " has not been opened"};
}

Status DeviceFeed::cover(const Media& media) {
  MutexLock lock(mutex_);
  for (const auto& gpu : gpus_) RETURN_IF_ERROR(gpu->begin());
  if (gpus_.empty() || !gpus_.front()->reach().ok()) return {};
  const Deadline deadline(kGrowTimeout.count());
  while (any_in_place()) {
    if (deadline.passed()) {
      return {Code::kTimeout, "the store has grown, and a GPU still reads from it"};
    }
    has_forgotten_.wait_for(lock, deadline.left());
  }
  (void)gpus_.front()->cover(place_in(media, 0), media.size());
  return {};
}

bool DeviceFeed::any_in_place() const {
  return std::ranges::any_of(under_way_, [](const Entry& entry) { return entry.in_place; });
}

Status DeviceFeed::submit(const OnDevice& on, const Media& media, Batch* batch) {
  // A check compares what lies on the device, so nothing of it may reach the media.
  const Snapshot how = batch->op == Op::kCheck ? Snapshot::kHost : on.how;
  const bool outward = batch->op == Op::kWrite || batch->op == Op::kCheck;
  const std::vector<DeviceSpan> spans = spans_of(*batch, media);
  // Held meanwhile: a piece may arrive before its batch would be known.
  MutexLock lock(mutex_);
  under_way_.reserve(under_way_.size() + 1);
  Gpu* const gpu = find(on.ordinal);
  Entry entry = {gpu, {}, batch->number, batch, batch->op == Op::kWrite, false};
  entry.in_place = how != Snapshot::kHost && gpu->reach().ok();
  RETURN_IF_ERROR(gpu->submit(outward ? Way::kOut : Way::kIn, how, on.stream, spans, &entry.moved));
  under_way_.push_back(entry);
  return {};
}

bool DeviceFeed::stream_wait(uint64_t number, uint64_t stream, int64_t timeout_ns, Status* status) {
  Gpu* gpu = nullptr;
  Moved moved;
  {
    MutexLock lock(mutex_);
    for (const Entry& entry : under_way_) {
      if (entry.number == number) gpu = entry.gpu, moved = entry.moved;
    }
  }
  if (gpu == nullptr) return false;
  *status = gpu->stream_wait(moved, stream, timeout_ns);
  return true;
}

void DeviceFeed::cancel(bool writes_only) {
  Status why(Code::kInvalid, "given up");
  try {
    why = {Code::kInvalid, "the version was given up"};
  } catch (const std::exception&) {  // the end of an engine may find no memory for that
  }
  MutexLock lock(mutex_);
  for (const Entry& entry : under_way_) {
    if (writes_only && !entry.write) continue;
    entry.gpu->mover().cancel(entry.moved.move, why);
  }
}

bool DeviceFeed::poll(Found* found) {
  for (size_t i = 0;; ++i) {
    {
      MutexLock lock(mutex_);
      if (i == gpus_.size()) return false;
      found->gpu = gpus_[i].get();
    }
    if (found->gpu->mover().next(0, &found->piece).ok()) break;
  }
  MutexLock lock(mutex_);
  found->batch = batch_of(found->gpu, found->piece.move);
  return true;
}

Batch* DeviceFeed::batch_of(const Gpu* gpu, uint64_t move) const {
  const auto found = std::ranges::find_if(
      under_way_, [&](const Entry& entry) { return entry.gpu == gpu && entry.moved.move == move; });
  CHECK(found != under_way_.end());
  return found->batch;
}

void DeviceFeed::give_back(const Found& found, const Status& status) {
  found.gpu->mover().finish(found.piece, status);
}

bool DeviceFeed::arrived(Batch** batch, Status* status) {
  MutexLock lock(mutex_);
  for (const auto& gpu : gpus_) {
    uint64_t move = 0;
    if (!gpu->mover().next_finished(&move)) continue;
    *batch = batch_of(gpu.get(), move);
    try {
      *status = gpu->mover().wait(move, 0);
    } catch (const std::exception&) {
      *status = no_host_memory();  // for its message: it has failed
    }
    return true;
  }
  return false;
}

void DeviceFeed::forget(uint64_t number) {
  MutexLock lock(mutex_);
  std::erase_if(under_way_, [&](const Entry& entry) { return entry.number == number; });
  has_forgotten_.notify_all();
}

}  // namespace lightckpt
