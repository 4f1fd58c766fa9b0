// Coming into a context and going, and making what lives in one. See cuda_objects.h.
#include "cuda_objects.h"

#include <algorithm>

namespace lightckpt {

Status CudaContext::retain(const CudaDriver& driver, int ordinal,
                           std::unique_ptr<CudaContext>* context) {
  int device = 0;
  RETURN_IF_ERROR(driver.device_handle(ordinal, &device));
  CudaContextHandle handle = nullptr;
  RETURN_IF_ERROR(driver.primary_context_retain(device, &handle));
  context->reset(new CudaContext(driver, device, ordinal, handle));
  return {};
}

Status CudaContext::release() {
  if (std::exchange(context_, nullptr) == nullptr) return {};
  return driver_.primary_context_release(device_);
}

Status CudaContext::enter(Entry* entry) const {
  CHECK(context_ != nullptr);
  CudaContextHandle before = nullptr;
  RETURN_IF_ERROR(driver_.context_current(&before));
  // Pushed only where another one is current. So if taking it off fails, whether it is still there
  // can be seen.
  if (before != context_) {
    RETURN_IF_ERROR(driver_.context_push(context_));
    entry->pushed = true;
  }
  entry->capture_mode = kCudaCaptureRelaxed;
  RETURN_IF_ERROR(driver_.capture_mode_exchange(&entry->capture_mode));
  entry->exchanged = true;
  return {};
}

Status CudaContext::leave(const Entry& entry) const {
  Status mode;
  if (entry.exchanged) {
    int relaxed = entry.capture_mode;
    mode = driver_.capture_mode_exchange(&relaxed);
    // A call may return what earlier work did wrong, before or after it has done its own. To set
    // the mode twice does no harm.
    relaxed = entry.capture_mode;
    if (!mode.ok()) (void)driver_.capture_mode_exchange(&relaxed);
  }
  if (!entry.pushed) return mode;
  Status pop = driver_.context_pop();
  CudaContextHandle still = nullptr;
  if (!pop.ok() && driver_.context_current(&still).ok() && still == context_) {
    (void)driver_.context_pop();
  }
  return mode.ok() ? pop : mode;
}

namespace {

// Owned before the context is left: leaving may fail too.
template <typename Handle, typename Owned, typename Create>
Status make(const CudaContext& context, Owned* owned, const Create& create) {
  return context.inside([&] {
    Handle handle{};
    RETURN_IF_ERROR(create(&handle));
    *owned = Owned(context, handle);
    return Status();
  });
}

}  // namespace

Status make_stream(const CudaContext& context, CudaStream* stream) {
  return make<CudaStreamHandle>(context, stream, [&](CudaStreamHandle* handle) {
    return context.driver().stream_create(handle);
  });
}

Status make_event(const CudaContext& context, CudaEvent* event) {
  return make<CudaEventHandle>(context, event, [&](CudaEventHandle* handle) {
    return context.driver().event_create(handle);
  });
}

Status make_memory(const CudaContext& context, uint64_t bytes, CudaMemory* memory) {
  return make<CudaPointer>(context, memory, [&](CudaPointer* handle) {
    return context.driver().memory_allocate(bytes, handle);
  });
}

Status CudaPinnedBuffer::make(const CudaContext& context, uint64_t bytes,
                              CudaPinnedBuffer* buffer) {
  buffer->bytes_ = bytes;
  return lightckpt::make<void*>(context, &buffer->memory_, [&](void** handle) {
    return context.driver().host_allocate(bytes, handle);
  });
}

Status CudaRegistration::make(const CudaContext& context, void* memory, uint64_t bytes,
                              bool read_only, CudaRegistration* registration,
                              uint64_t piece_bytes) {
  CHECK(bytes > 0 && piece_bytes > 0);
  CudaRegistration made;
  made.pinned_ = {static_cast<std::byte*>(memory), bytes, piece_bytes};
  made.pieces_.reserve((bytes - 1) / piece_bytes + 1);
  for (uint64_t at = 0; at < bytes; at += std::min(piece_bytes, bytes - at)) {
    std::byte* const piece = made.pinned_.memory + at;
    const uint64_t length = std::min(piece_bytes, bytes - at);
    made.pieces_.emplace_back();
    // What is registered so far goes with `made`.
    RETURN_IF_ERROR(lightckpt::make<void*>(context, &made.pieces_.back(), [&](void** handle) {
      *handle = piece;
      return context.driver().host_register(piece, length, read_only);
    }));
  }
  *registration = std::move(made);
  return {};
}

Status CudaRegistration::reset() {
  Status status;
  for (CudaRegistered& piece : pieces_) {
    if (Status one = piece.reset(); status.ok()) status = one;
  }
  pieces_.clear();
  pinned_ = {};
  return status;
}

}  // namespace lightckpt
