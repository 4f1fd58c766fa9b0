// Giving work to lanes, and seeing that it is done. See device_cuda.h.
#include "device_cuda.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include "deadline.h"

namespace lightckpt {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

constexpr uint64_t kIndexBits = 16;
static_assert(CudaDevice::kCopiesMax <= 1 << kIndexBits);
constexpr size_t kPartsMax = 1024;  // of most copies; where there are more, memory is asked for
constexpr size_t kLooks = 8;        // at copies under way, before there is one more
constexpr microseconds kPauseMin{20};
constexpr microseconds kPauseMax{1000};

CudaStreamHandle handle_of(uint64_t stream) { return reinterpret_cast<CudaStreamHandle>(stream); }

void* memory_at(CudaPointer pointer) { return reinterpret_cast<void*>(pointer); }

// Calls `each` with the parts of a span between which there is a border of the host's memory.
template <typename Each>
void each_part(const CudaSpan& span, const CudaPinned& host, const Each& each) {
  CHECK(span.bytes <= host.bytes && span.offset <= host.bytes - span.bytes);
  for (uint64_t at = 0; at < span.bytes;) {
    const uint64_t offset = span.offset + at;
    const uint64_t part = std::min(span.bytes - at, host.border_after(offset) - offset);
    each(span.device + at, host.memory + offset, part);
    at += part;
  }
}

}  // namespace

Status CudaDevice::open(const CudaContext& context, uint32_t lanes,
                        std::unique_ptr<CudaDevice>* device) {
  CHECK(lanes > 0);
  std::unique_ptr<CudaDevice> made(new CudaDevice(context));
  {
    MutexLock lock(made->mutex_);
    RETURN_IF_ERROR(make_event(context, &made->ready_));
    // Copies are given by workers too, which allocate nothing.
    made->copies_.reserve(kCopiesMax);
    made->free_.reserve(kCopiesMax);
    made->targets_.reserve(kPartsMax);
    made->sources_.reserve(kPartsMax);
    made->sizes_.reserve(kPartsMax);
  }
  made->lanes_.resize(lanes);
  for (CudaStream& lane : made->lanes_) RETURN_IF_ERROR(make_stream(context, &lane));
  *device = std::move(made);
  return {};
}

Status CudaDevice::refuse_capture(CudaStreamHandle stream) const {
  bool capturing = false;
  RETURN_IF_ERROR(context_.driver().stream_capturing(stream, &capturing));
  if (!capturing) return {};
  return {Code::kBusy, "the stream records a CUDA graph, and copies cannot be part of it"};
}

Status CudaDevice::order_after(uint64_t stream, uint32_t* lane) {
  MutexLock lock(mutex_);
  return context_.inside([&] {
    mutex_.is_held();
    return order_inside(stream, lane);
  });
}

Status CudaDevice::order_inside(uint64_t stream, uint32_t* lane) {
  const CudaDriver& driver = context_.driver();
  RETURN_IF_ERROR(refuse_capture(handle_of(stream)));
  RETURN_IF_ERROR(driver.event_record(ready_.get(), handle_of(stream)));
  // The lane waits for this recording, also when the event is recorded again.
  RETURN_IF_ERROR(driver.stream_wait_event(lanes_[next_lane_].get(), ready_.get()));
  *lane = next_lane_;
  next_lane_ = (next_lane_ + 1) % lanes();
  return {};
}

uint64_t CudaDevice::number_of(uint32_t index) const {
  return copies_[index].generation << kIndexBits | index;
}

CudaDevice::Copy* CudaDevice::find(uint64_t number) {
  const uint64_t index = number & ((1 << kIndexBits) - 1);
  CHECK(number > 0 && index < copies_.size());
  Copy* const copy = &copies_[index];
  return copy->under_way && copy->generation == number >> kIndexBits ? copy : nullptr;
}

// Inside the context.
Status CudaDevice::query(Copy* copy, bool* done) {
  const CudaDriver& driver = context_.driver();
  RETURN_IF_ERROR(copy->recorded ? driver.event_query(copy->event.get(), done)
                                 : driver.stream_query(lanes_[copy->lane].get(), done));
  if (!*done) return {};
  copy->under_way = false;
  ++copy->generation;
  free_.push_back(static_cast<uint32_t>(copy - copies_.data()));
  has_done_.notify_all();
  return {};
}

// Inside the context.
Status CudaDevice::take_free(uint32_t* index) {
  const size_t looks = copies_.size() < kCopiesMax ? kLooks : kCopiesMax;
  for (size_t i = 0; i < std::min(looks, copies_.size()) && free_.empty(); ++i) {
    Copy& copy = copies_[next_look_++ % copies_.size()];
    bool done = false;
    if (copy.under_way) RETURN_IF_ERROR(query(&copy, &done));
  }
  if (free_.empty()) {
    if (copies_.size() == kCopiesMax) {
      return {Code::kBusy, std::to_string(kCopiesMax) + " copies are under way: wait for some"};
    }
    CudaEventHandle handle = nullptr;
    RETURN_IF_ERROR(context_.driver().event_create(&handle));
    copies_.emplace_back().event = CudaEvent(context_, handle);
    free_.push_back(static_cast<uint32_t>(copies_.size() - 1));
  }
  *index = free_.back();
  free_.pop_back();
  return {};
}

// Gives the lane the parts gathered so far: many at once if the driver can and may, else by `each`.
// Drivers refuse a batch for reasons of their own (a mixture of memory, a legacy stream), and some
// of it may be under way then: copied twice in order, it is the same.
template <typename Each>
Status CudaDevice::enqueue(CudaStreamHandle stream, const Each& each) {
  size_t at = 0;
  bool refused = false;
  while (copies_many_ && !refused && targets_.size() - at > 1) {
    const size_t count = std::min(targets_.size() - at, CudaDriver::kManyMax);
    const Status status = context_.driver().copy_many(targets_.data() + at, sources_.data() + at,
                                                      sizes_.data() + at, count, stream);
    refused = !status.ok();
    if (!refused) at += count;
  }
  for (; at < targets_.size(); ++at) {
    RETURN_IF_ERROR(each(targets_[at], sources_[at], sizes_[at], stream));
  }
  if (refused) copies_many_ = false;  // it was not the copies
  return {};
}

// `gather` adds the parts, `each` gives a stream one of them.
template <typename Gather, typename Each>
Status CudaDevice::copy_with(uint32_t lane, uint64_t* number, const Gather& gather,
                             const Each& each) {
  CHECK(lane < lanes());
  *number = 0;
  return context_.inside([&]() -> Status {
    mutex_.is_held();
    uint32_t index = 0;
    RETURN_IF_ERROR(take_free(&index));
    Copy* const copy = &copies_[index];
    *number = number_of(index);
    copy->lane = lane;
    copy->under_way = true;
    copy->recorded = false;
    Status status;
    try {
      status = give(copy, gather, each);
    } catch (const std::exception&) {
      status = no_host_memory();  // as any failure half way
    }
    return status;
  });
}

template <typename Gather, typename Each>
Status CudaDevice::give(Copy* copy, const Gather& gather, const Each& each) {
  const CudaStreamHandle stream = lanes_[copy->lane].get();
  targets_.clear();
  sources_.clear();
  sizes_.clear();
  gather();
  const Status status = enqueue(stream, each);
  const Status recorded = context_.driver().event_record(copy->event.get(), stream);
  copy->recorded = recorded.ok();
  return status.ok() ? recorded : status;
}

void CudaDevice::add(CudaPointer target, CudaPointer source, uint64_t bytes) {
  if (bytes == 0) return;
  targets_.push_back(target);
  sources_.push_back(source);
  sizes_.push_back(bytes);
}

Status CudaDevice::copy_out(uint32_t lane, std::span<const CudaSpan> spans,
                            const CudaPinned& target, uint64_t* copy) {
  MutexLock lock(mutex_);
  const auto gather = [&] {
    mutex_.is_held();
    for (const CudaSpan& span : spans) {
      each_part(span, target, [&](CudaPointer device, std::byte* host, uint64_t bytes) {
        mutex_.is_held();
        add(cuda_pointer(host), device, bytes);
      });
    }
  };
  return copy_with(lane, copy, gather,
                   [&](CudaPointer host, CudaPointer device, uint64_t bytes, auto stream) {
                     return context_.driver().copy_to_host(memory_at(host), device, bytes, stream);
                   });
}

Status CudaDevice::copy_in(uint32_t lane, std::span<const CudaSpan> spans, const CudaPinned& source,
                           uint64_t* copy) {
  MutexLock lock(mutex_);
  const auto gather = [&] {
    mutex_.is_held();
    for (const CudaSpan& span : spans) {
      each_part(span, source, [&](CudaPointer device, std::byte* host, uint64_t bytes) {
        mutex_.is_held();
        add(device, cuda_pointer(host), bytes);
      });
    }
  };
  return copy_with(
      lane, copy, gather, [&](CudaPointer device, CudaPointer host, uint64_t bytes, auto stream) {
        return context_.driver().copy_to_device(device, memory_at(host), bytes, stream);
      });
}

Status CudaDevice::copy_aside(uint32_t lane, std::span<const CudaPair> pairs, uint64_t* copy) {
  MutexLock lock(mutex_);
  const auto gather = [&] {
    mutex_.is_held();
    for (const CudaPair& pair : pairs) add(pair.target, pair.source, pair.bytes);
  };
  return copy_with(lane, copy, gather,
                   [&](CudaPointer target, CudaPointer source, uint64_t bytes, auto stream) {
                     return context_.driver().copy_on_device(target, source, bytes, stream);
                   });
}

Status CudaDevice::stream_wait(uint64_t number, uint64_t stream) {
  MutexLock lock(mutex_);
  return context_.inside([&]() -> Status {
    mutex_.is_held();
    RETURN_IF_ERROR(refuse_capture(handle_of(stream)));
    Copy* const copy = find(number);
    if (copy == nullptr) return {};  // it was seen done
    if (!copy->recorded) return {Code::kIo, "there is no event behind a copy that failed"};
    return context_.driver().stream_wait_event(handle_of(stream), copy->event.get());
  });
}

Status CudaDevice::done(uint64_t number, bool* done) {
  *done = true;
  MutexLock lock(mutex_);
  Copy* const copy = find(number);
  if (copy == nullptr) return {};
  *done = false;
  return context_.inside([&] {
    mutex_.is_held();
    return query(copy, done);
  });
}

Status CudaDevice::wait(uint64_t number, int64_t timeout_ns) {
  const Deadline deadline(timeout_ns);
  nanoseconds pause = kPauseMin;
  while (true) {
    bool through = false;
    RETURN_IF_ERROR(done(number, &through));
    if (through) return {};
    if (deadline.passed()) return {Code::kTimeout, "the copy is not done " + deadline.after()};
    // CUDA's own wait has no end, so this one looks again and again.
    MutexLock lock(mutex_);
    has_done_.wait_for(lock, std::min(pause, deadline.left()));
    pause = std::min<nanoseconds>(pause * 2, kPauseMax);
  }
}

Status CudaDevice::close() {
  Status status;
  const auto keep_first = [&](const Status& one) {
    if (status.ok()) status = one;
  };
  MutexLock lock(mutex_);
  for (CudaStream& lane : lanes_) {
    if (lane.get() == nullptr) continue;
    const auto wait = [&] { return context_.driver().stream_synchronize(lane.get()); };
    const Status waited = context_.inside(wait);
    // An error may be of what others did; then the copies may still be under way.
    if (!waited.ok()) (void)context_.inside(wait);
    keep_first(waited);
    keep_first(lane.reset());
  }
  lanes_.clear();
  for (Copy& copy : copies_) keep_first(copy.event.reset());
  copies_.clear();
  free_.clear();
  keep_first(ready_.reset());
  return status;
}

}  // namespace lightckpt
