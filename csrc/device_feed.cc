// Submitting to GPUs, and asking them. See device_feed.h.
#include "device_feed.h"

#include <algorithm>
#include <exception>

#include "deadline.h"

namespace lightckpt {
namespace {

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

bool lie_within(const std::vector<DeviceSpan>& spans, const CudaPinned& places) {
  return places.memory != nullptr && std::ranges::all_of(spans, [&](const DeviceSpan& span) {
           return span.bytes == 0 || span.place + span.bytes <= places.memory + places.bytes;
         });
}

}  // namespace

DeviceFeed::~DeviceFeed() {
  if (reach_ != nullptr) reach_->leave_off();
  upkeep_.reset();
  // All of them, before the registration goes that one of them has made.
  for (const Opened& device : devices_) device.gpu->close();
  reach_.reset();
}

Status DeviceFeed::open(const CudaDriver& driver, int ordinal, const DeviceOptions& options,
                        Store* store, DeviceInfo* info) {
  patience_ns_ = options.patience_ns;
  if (!check_open(ordinal).ok()) {
    RETURN_IF_ERROR(open_new(driver, ordinal, options.ring_bytes, store));
  }
  extend(store->media());
  RETURN_IF_ERROR(driver.device_name(ordinal, &info->name));
  RETURN_IF_ERROR(driver.version(&info->driver_version));
  MutexLock lock(mutex_);
  const Opened& device = *find(ordinal);
  info->ring_bytes = device.gpu->ring_bytes();
  info->direct = reach_of(device);
  return {};
}

Status DeviceFeed::open_new(const CudaDriver& driver, int ordinal, uint64_t ring_bytes,
                            Store* store) {
  if (upkeep_ == nullptr) upkeep_ = std::make_unique<Upkeep>();
  Opened opened;
  RETURN_IF_ERROR(Gpu::open(driver, ordinal, ring_bytes, patience_ns_, upkeep_.get(), &opened.gpu));
  opened.may_reach = may_reach(driver, ordinal, store->read_only());
  if (store->media().granularity() == Granularity::kPage) {
    opened.may_reach = {Code::kIo,
                        "the store is a plain file: msync does not hear of what a GPU writes"};
  }
  MutexLock lock(mutex_);
  devices_.reserve(devices_.size() + 1);
  if (opened.may_reach.ok() && reach_ == nullptr) {
    reach_ = std::make_unique<Reach>(opened.gpu->context(), place_in(store->media(), 0),
                                     store->read_only());
  }
  devices_.push_back(std::move(opened));
  return {};
}

// Asks for each part once. Where there is no host memory to ask with, the next attempt does.
void DeviceFeed::extend(const Media& media) {
  const uint64_t bytes = media.size() / kPageBytes * kPageBytes;
  Reach* reach = nullptr;
  {
    MutexLock lock(mutex_);
    reach = reach_.get();
  }
  if (reach == nullptr || bytes <= asked_bytes_) return;
  try {
    (void)upkeep_->run([reach, bytes] { reach->extend(bytes); }, Deadline(patience_ns_));
    asked_bytes_ = bytes;
  } catch (const std::exception&) {
    return;
  }
}

const DeviceFeed::Opened* DeviceFeed::find(int ordinal) const {
  for (const Opened& device : devices_) {
    if (device.gpu->ordinal() == ordinal) return &device;
  }
  return nullptr;
}

// Also ok while the media is still being registered: what is not yet, takes the ring.
Status DeviceFeed::reach_of(const Opened& device) const {
  return device.may_reach.ok() ? reach_->status() : device.may_reach;
}

Status DeviceFeed::check_open(int ordinal) const {
  MutexLock lock(mutex_);
  if (find(ordinal) != nullptr) return {};
  return {Code::kInvalid, "device " + std::to_string(ordinal) + " has not been opened"};
}

void DeviceFeed::begin(const Media& media) {
  {
    MutexLock lock(mutex_);
    for (const Opened& device : devices_) device.gpu->begin();
  }
  extend(media);
}

Status DeviceFeed::submit(const OnDevice& on, const Media& media, Batch* batch) {
  // A check compares what lies on the device, so nothing of it may reach the media.
  const Snapshot how = batch->op == Op::kCheck ? Snapshot::kHost : on.how;
  const bool outward = batch->op == Op::kWrite || batch->op == Op::kCheck;
  const std::vector<DeviceSpan> spans = spans_of(*batch, media);
  Entry entry = {nullptr, 0, batch->number, batch, batch->op == Op::kWrite, false};
  CudaPinned places;
  {
    MutexLock lock(mutex_);
    const Opened& device = *find(on.ordinal);
    const Status reach = reach_of(device);
    if (how == Snapshot::kDirect && !reach.ok()) return reach;
    if (how != Snapshot::kHost && reach.ok()) places = reach_->pinned();
    entry.gpu = device.gpu.get();
  }
  entry.in_place = lie_within(spans, places);
  CudaPointer aside = 0;
  if (how == Snapshot::kDevice && outward) {
    RETURN_IF_ERROR(entry.gpu->take_aside(spans, &aside));
  }
  // Held meanwhile: a piece may arrive before its batch would be known.
  MutexLock lock(mutex_);
  under_way_.reserve(under_way_.size() + 1);
  RETURN_IF_ERROR(entry.gpu->submit(outward ? Way::kOut : Way::kIn, on.stream, spans,
                                    entry.in_place ? &places : nullptr, aside, &entry.move));
  under_way_.push_back(entry);
  return {};
}

bool DeviceFeed::stream_wait(uint64_t number, uint64_t stream, int64_t timeout_ns, Status* status) {
  Gpu* gpu = nullptr;
  uint64_t move = 0;
  {
    MutexLock lock(mutex_);
    for (const Entry& entry : under_way_) {
      if (entry.number == number) gpu = entry.gpu, move = entry.move;
    }
  }
  if (gpu == nullptr) return false;
  *status = gpu->mover().stream_wait(move, stream, timeout_ns);
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
    entry.gpu->mover().cancel(entry.move, why);
  }
}

bool DeviceFeed::poll(Found* found) {
  for (size_t i = 0;; ++i) {
    {
      MutexLock lock(mutex_);
      if (i == devices_.size()) return false;
      found->gpu = devices_[i].gpu.get();
    }
    if (found->gpu->mover().next(0, &found->piece).ok()) break;
  }
  MutexLock lock(mutex_);
  found->batch = entry_of(found->gpu, found->piece.move).batch;
  return true;
}

const DeviceFeed::Entry& DeviceFeed::entry_of(const Gpu* gpu, uint64_t move) const {
  const auto found = std::ranges::find_if(
      under_way_, [&](const Entry& entry) { return entry.gpu == gpu && entry.move == move; });
  CHECK(found != under_way_.end());
  return *found;
}

void DeviceFeed::give_back(const Found& found, const Status& status) {
  found.gpu->mover().finish(found.piece, status);
}

bool DeviceFeed::arrived(Arrival* arrival) {
  MutexLock lock(mutex_);
  for (const Opened& device : devices_) {
    Gpu* const gpu = device.gpu.get();
    uint64_t move = 0;
    if (!gpu->mover().next_finished(&move)) continue;
    const Entry& entry = entry_of(gpu, move);
    arrival->batch = entry.batch;
    arrival->in_place = entry.in_place;
    try {
      arrival->status = gpu->mover().wait(move, 0);
    } catch (const std::exception&) {
      arrival->status = no_host_memory();  // for its message: it has failed
    }
    return true;
  }
  return false;
}

void DeviceFeed::forget(uint64_t number) {
  MutexLock lock(mutex_);
  std::erase_if(under_way_, [&](const Entry& entry) { return entry.number == number; });
}

}  // namespace lightckpt
