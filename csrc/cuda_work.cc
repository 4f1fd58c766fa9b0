// The calls inside a context: streams, events, copies and memory. See cuda_driver.h.
#include <array>

#include "cuda_driver.h"

namespace lightckpt {
namespace {

// From cuda.h; their values have never changed.
constexpr int kCaptureImplicit = 906;
constexpr int kNotSupported = 801;
constexpr int kSourceInStreamOrder = 1;
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kDisableTiming = 2;
constexpr unsigned kPortable = 1;
constexpr unsigned kReadOnly = 8;
constexpr unsigned kOverlapWithCompute = 1;

}  // namespace

Status CudaDriver::stream_create(CudaStreamHandle* stream) const {
  int least = 0;
  int greatest = 0;  // the highest priority is the lowest number
  RETURN_IF_ERROR(checked("cuCtxGetStreamPriorityRange",
                          calls_->ctx_get_stream_priority_range(&least, &greatest)));
  return checked("cuStreamCreateWithPriority",
                 calls_->stream_create_with_priority(stream, kNonBlocking, greatest));
}

Status CudaDriver::stream_destroy(CudaStreamHandle stream) const {
  return checked("cuStreamDestroy", calls_->stream_destroy(stream));
}

Status CudaDriver::stream_query(CudaStreamHandle stream, bool* done) const {
  return queried("cuStreamQuery", calls_->stream_query(stream), done);
}

Status CudaDriver::stream_synchronize(CudaStreamHandle stream) const {
  return checked("cuStreamSynchronize", calls_->stream_synchronize(stream));
}

Status CudaDriver::stream_wait_event(CudaStreamHandle stream, CudaEventHandle event) const {
  return checked("cuStreamWaitEvent", calls_->stream_wait_event(stream, event, 0));
}

Status CudaDriver::stream_capturing(CudaStreamHandle stream, bool* capturing) const {
  int status = 0;
  const int result = calls_->stream_is_capturing(stream, &status);
  // The legacy stream, while one that waits for it is captured.
  *capturing = status != 0 || result == kCaptureImplicit;
  return result == kCaptureImplicit ? Status() : checked("cuStreamIsCapturing", result);
}

Status CudaDriver::event_create(CudaEventHandle* event) const {
  return checked("cuEventCreate", calls_->event_create(event, kDisableTiming));
}

Status CudaDriver::event_destroy(CudaEventHandle event) const {
  return checked("cuEventDestroy", calls_->event_destroy(event));
}

Status CudaDriver::event_record(CudaEventHandle event, CudaStreamHandle stream) const {
  return checked("cuEventRecord", calls_->event_record(event, stream));
}

Status CudaDriver::event_query(CudaEventHandle event, bool* done) const {
  return queried("cuEventQuery", calls_->event_query(event), done);
}

Status CudaDriver::event_synchronize(CudaEventHandle event) const {
  return checked("cuEventSynchronize", calls_->event_synchronize(event));
}

Status CudaDriver::copy_to_host(void* target, CudaPointer source, uint64_t bytes,
                                CudaStreamHandle stream) const {
  return checked("cuMemcpyDtoHAsync", calls_->memcpy_dtoh_async(target, source, bytes, stream));
}

Status CudaDriver::copy_to_device(CudaPointer target, const void* source, uint64_t bytes,
                                  CudaStreamHandle stream) const {
  return checked("cuMemcpyHtoDAsync", calls_->memcpy_htod_async(target, source, bytes, stream));
}

Status CudaDriver::copy_on_device(CudaPointer target, CudaPointer source, uint64_t bytes,
                                  CudaStreamHandle stream) const {
  return checked("cuMemcpyDtoDAsync", calls_->memcpy_dtod_async(target, source, bytes, stream));
}

Status CudaDriver::copy_many(CudaPointer* targets, CudaPointer* sources, size_t* sizes,
                             size_t count, CudaStreamHandle stream) const {
  CHECK(count <= kManyMax);
  CudaCopyAttributes attributes = {kSourceInStreamOrder, {}, {}, kOverlapWithCompute};
  // One set of attributes takes one index, that of the first copy that it is of. A driver that
  // looks at an index for each copy finds one.
  std::array<size_t, kManyMax> indexes{};
  size_t failed = 0;
  int result = kNotSupported;
  if (calls_->memcpy_batch_async_v2 != nullptr) {
    result = calls_->memcpy_batch_async_v2(targets, sources, sizes, count, &attributes,
                                           indexes.data(), 1, stream);
  } else if (calls_->memcpy_batch_async != nullptr) {
    result = calls_->memcpy_batch_async(targets, sources, sizes, count, &attributes, indexes.data(),
                                        1, &failed, stream);
  }
  if (result == kNotSupported) return {Code::kNotFound, "this driver copies one by one"};
  return checked("cuMemcpyBatchAsync", result);
}

Status CudaDriver::memory_allocate(uint64_t bytes, CudaPointer* memory) const {
  return checked("cuMemAlloc", calls_->mem_alloc(memory, bytes));
}

Status CudaDriver::memory_free(CudaPointer memory) const {
  return checked("cuMemFree", calls_->mem_free(memory));
}

Status CudaDriver::host_allocate(uint64_t bytes, void** memory) const {
  return checked("cuMemHostAlloc", calls_->mem_host_alloc(memory, bytes, kPortable));
}

Status CudaDriver::host_free(void* memory) const {
  return checked("cuMemFreeHost", calls_->mem_free_host(memory));
}

Status CudaDriver::host_register(void* memory, uint64_t bytes, bool read_only) const {
  const unsigned flags = kPortable | (read_only ? kReadOnly : 0);
  return checked("cuMemHostRegister", calls_->mem_host_register(memory, bytes, flags));
}

Status CudaDriver::host_unregister(void* memory) const {
  return checked("cuMemHostUnregister", calls_->mem_host_unregister(memory));
}

}  // namespace lightckpt
