// CudaCalls: the functions of CUDA's driver API that are called here, as cuda.h declares them.
//
// The declarations are those of cuda.h 11.0 to 13.0. Handles are opaque, results are CUresults.
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lightckpt {

using CudaPointer = uint64_t;  // CUdeviceptr
inline CudaPointer cuda_pointer(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }
using CudaContextHandle = struct CudaContextOpaque*;  // CUcontext
using CudaStreamHandle = struct CudaStreamOpaque*;    // CUstream: 0 and 1 legacy, 2 per thread
using CudaEventHandle = struct CudaEventOpaque*;      // CUevent

// CUmemcpyAttributes; hints for memory that has no fixed place are not for us.
struct CudaCopyAttributes {
  int source_order;
  int source_hint[2];
  int target_hint[2];
  unsigned flags;
};

struct CudaCalls {
  int (*get_error_name)(int result, const char** name);
  int (*get_error_string)(int result, const char** text);
  int (*init)(unsigned flags);
  int (*driver_get_version)(int* version);
  int (*device_get)(int* device, int ordinal);
  int (*device_get_count)(int* count);
  int (*device_get_name)(char* name, int bytes, int device);
  int (*device_get_attribute)(int* value, int attribute, int device);
  int (*primary_ctx_retain)(CudaContextHandle* context, int device);
  int (*primary_ctx_release)(int device);
  int (*ctx_get_current)(CudaContextHandle* context);
  int (*ctx_push_current)(CudaContextHandle context);
  int (*ctx_pop_current)(CudaContextHandle* context);
  int (*ctx_get_stream_priority_range)(int* least, int* greatest);
  int (*thread_exchange_stream_capture_mode)(int* mode);
  int (*stream_create_with_priority)(CudaStreamHandle* stream, unsigned flags, int priority);
  int (*stream_destroy)(CudaStreamHandle stream);
  int (*stream_query)(CudaStreamHandle stream);
  int (*stream_synchronize)(CudaStreamHandle stream);
  int (*stream_wait_event)(CudaStreamHandle stream, CudaEventHandle event, unsigned flags);
  int (*stream_is_capturing)(CudaStreamHandle stream, int* status);
  int (*event_create)(CudaEventHandle* event, unsigned flags);
  int (*event_destroy)(CudaEventHandle event);
  int (*event_record)(CudaEventHandle event, CudaStreamHandle stream);
  int (*event_query)(CudaEventHandle event);
  int (*event_synchronize)(CudaEventHandle event);
  int (*memcpy_dtoh_async)(void* target, CudaPointer source, size_t bytes, CudaStreamHandle stream);
  int (*memcpy_htod_async)(CudaPointer target, const void* source, size_t bytes,
                           CudaStreamHandle stream);
  int (*memcpy_dtod_async)(CudaPointer target, CudaPointer source, size_t bytes,
                           CudaStreamHandle stream);
  // Either, or none: the third-last argument went with CUDA 13.
  int (*memcpy_batch_async_v2)(CudaPointer* targets, CudaPointer* sources, size_t* sizes,
                               size_t count, CudaCopyAttributes* attributes, size_t* indexes,
                               size_t attribute_count, CudaStreamHandle stream);
  int (*memcpy_batch_async)(CudaPointer* targets, CudaPointer* sources, size_t* sizes, size_t count,
                            CudaCopyAttributes* attributes, size_t* indexes, size_t attribute_count,
                            size_t* failed, CudaStreamHandle stream);
  int (*mem_alloc)(CudaPointer* memory, size_t bytes);
  int (*mem_free)(CudaPointer memory);
  int (*mem_host_alloc)(void** memory, size_t bytes, unsigned flags);
  int (*mem_free_host)(void* memory);
  int (*mem_host_register)(void* memory, size_t bytes, unsigned flags);
  int (*mem_host_unregister)(void* memory);
  int (*pointer_get_attributes)(unsigned count, int* attributes, void** values,
                                CudaPointer address);

  // Takes them from a library. Returns the name of the first that it lacks and that is needed, or
  // null.
  const char* find(void* library);

 private:
  template <typename Take>
  void find_work(const Take& take);
};

}  // namespace lightckpt
