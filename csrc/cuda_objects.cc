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

Status register_memory(const CudaContext& context, void* memory, uint64_t bytes, bool read_only,
                       CudaRegistered* registered) {
  CHECK(bytes > 0);
  return make<void*>(context, registered, [&](void** handle) {
    *handle = memory;
    return context.driver().host_register(memory, bytes, read_only);
  });
}

uint64_t CudaPinned::border_after(uint64_t offset) const {
  if (borders == nullptr) return UINT64_MAX;
  const auto next = std::ranges::upper_bound(*borders, offset);
  return next != borders->end() ? *next : UINT64_MAX;
}

}  // namespace lightckpt
