// Calling libcuda through pointers. See cuda_driver.h.
#include "cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>

#include "fork.h"

namespace lightckpt {
namespace {

// From cuda.h; their values have never changed.
constexpr int kOutOfMemory = 2;
constexpr int kStubLibrary = 34;
constexpr int kNoDevice = 100;
constexpr int kInvalidDevice = 101;
constexpr int kNotFoundResult = 500;
constexpr int kNotReady = 600;
constexpr int kCaptureImplicit = 906;
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kDisableTiming = 2;
constexpr unsigned kPortable = 1;
constexpr unsigned kReadOnly = 8;
constexpr int kNotSupported = 801;
constexpr int kSourceInStreamOrder = 1;
constexpr unsigned kOverlapWithCompute = 1;
constexpr int kMemoryType = 2;
constexpr int kIsManaged = 8;
constexpr int kDeviceOrdinal = 9;

bool loses_the_context(int result) {
  constexpr std::array kLost = {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721};
  return std::ranges::find(kLost, result) != kLost.end();
}

}  // namespace

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

  // Returns the name of the first function that the library lacks, or null.
  const char* find(void* library) {
    const char* missing = nullptr;
    const auto take = [&](auto* call, const char* name) {
      *call = reinterpret_cast<std::remove_pointer_t<decltype(call)>>(dlsym(library, name));
      if (*call == nullptr && missing == nullptr) missing = name;
    };
    take(&init, "cuInit");
    take(&get_error_name, "cuGetErrorName");
    take(&get_error_string, "cuGetErrorString");
    take(&driver_get_version, "cuDriverGetVersion");
    take(&device_get, "cuDeviceGet");
    take(&device_get_count, "cuDeviceGetCount");
    take(&device_get_name, "cuDeviceGetName");
    take(&primary_ctx_retain, "cuDevicePrimaryCtxRetain");
    take(&primary_ctx_release, "cuDevicePrimaryCtxRelease_v2");
    take(&ctx_get_current, "cuCtxGetCurrent");
    take(&ctx_push_current, "cuCtxPushCurrent_v2");
    take(&ctx_pop_current, "cuCtxPopCurrent_v2");
    take(&ctx_get_stream_priority_range, "cuCtxGetStreamPriorityRange");
    take(&thread_exchange_stream_capture_mode, "cuThreadExchangeStreamCaptureMode");
    find_work(take);
    const char* const needed = missing;
    take(&memcpy_batch_async_v2, "cuMemcpyBatchAsync_v2");
    take(&memcpy_batch_async, "cuMemcpyBatchAsync");
    return needed;
  }

 private:
  template <typename Take>
  void find_work(const Take& take) {
    take(&stream_create_with_priority, "cuStreamCreateWithPriority");
    take(&stream_destroy, "cuStreamDestroy_v2");
    take(&stream_query, "cuStreamQuery");
    take(&stream_synchronize, "cuStreamSynchronize");
    take(&stream_wait_event, "cuStreamWaitEvent");
    take(&stream_is_capturing, "cuStreamIsCapturing");
    take(&event_create, "cuEventCreate");
    take(&event_destroy, "cuEventDestroy_v2");
    take(&event_record, "cuEventRecord");
    take(&event_query, "cuEventQuery");
    take(&event_synchronize, "cuEventSynchronize");
    take(&memcpy_dtoh_async, "cuMemcpyDtoHAsync_v2");
    take(&memcpy_htod_async, "cuMemcpyHtoDAsync_v2");
    take(&memcpy_dtod_async, "cuMemcpyDtoDAsync_v2");
    take(&mem_alloc, "cuMemAlloc_v2");
    take(&mem_free, "cuMemFree_v2");
    take(&mem_host_alloc, "cuMemHostAlloc");
    take(&mem_free_host, "cuMemFreeHost");
    take(&mem_host_register, "cuMemHostRegister_v2");
    take(&mem_host_unregister, "cuMemHostUnregister");
    take(&pointer_get_attributes, "cuPointerGetAttributes");
  }
};

CudaDriver::CudaDriver(std::unique_ptr<CudaCalls> calls) : calls_(std::move(calls)) {}
CudaDriver::~CudaDriver() = default;

Status CudaDriver::load(const CudaDriver** driver) {
  struct Loaded {
    std::unique_ptr<CudaDriver> driver;
    Status status = load(kCudaLibrary, &driver);
    Loaded() {
      if (status.ok()) status = driver->init();
    }
  };
  static constinit std::atomic<const Loaded*> kept = nullptr;
  const Loaded& loaded = load_once(&kept, [] { return std::make_unique<const Loaded>(); });
  *driver = loaded.status.ok() ? loaded.driver.get() : nullptr;
  return loaded.status;
}

Status CudaDriver::load(const char* name, std::unique_ptr<CudaDriver>* driver) {
  void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return {Code::kNotFound,
            std::string("CUDA cannot be used (") + (why ? why : name) +
                "): install NVIDIA's driver, and in a container start it with GPUs"};
  }
  auto calls = std::make_unique<CudaCalls>();
  if (const char* missing = calls->find(handle); missing != nullptr) {
    dlclose(handle);
    return {Code::kNotFound,
            std::string(name) + " has no " + missing + ": drivers have it from CUDA 11.0 on"};
  }
  driver->reset(new CudaDriver(std::move(calls)));
  return {};
}

Status CudaDriver::checked(const char* call, int result) const {
  if (result == 0) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  std::string message = std::string(call) + ": ";
  if (calls_->get_error_name(result, &name) == 0 && name != nullptr) {
    message += name;
  } else {
    message += "CUDA error " + std::to_string(result);
  }
  if (calls_->get_error_string(result, &text) == 0 && text != nullptr) {
    message += std::string(" (") + text + ")";
  }
  if (loses_the_context(result)) {
    message += "; CUDA returns this from every call until the process ends, whatever caused it";
  }
  switch (result) {
    case kOutOfMemory:
      return {Code::kNoSpace, std::move(message)};
    case kStubLibrary:
    case kNoDevice:
    case kInvalidDevice:
    case kNotFoundResult:
      return {Code::kNotFound, std::move(message)};
    default:
      return {Code::kIo, std::move(message)};
  }
}

Status CudaDriver::queried(const char* call, int result, bool* done) const {
  *done = result == 0;
  return result == kNotReady ? Status() : checked(call, result);
}

Status CudaDriver::init() const { return checked("cuInit", calls_->init(0)); }

Status CudaDriver::version(int* version) const {
  return checked("cuDriverGetVersion", calls_->driver_get_version(version));
}

Status CudaDriver::device_count(int* count) const {
  return checked("cuDeviceGetCount", calls_->device_get_count(count));
}

Status CudaDriver::device_name(int ordinal, std::string* name) const {
  int device = 0;
  RETURN_IF_ERROR(device_handle(ordinal, &device));
  std::array<char, 256> text{};
  RETURN_IF_ERROR(checked("cuDeviceGetName",
                          calls_->device_get_name(text.data(), int{text.size()} - 1, device)));
  *name = text.data();
  return {};
}

Status CudaDriver::pointer_info(CudaPointer address, CudaPointerInfo* info) const {
  unsigned type = 0;
  int device = -1;
  unsigned managed = 0;
  std::array attributes = {kMemoryType, kDeviceOrdinal, kIsManaged};
  std::array<void*, 3> values = {&type, &device, &managed};
  RETURN_IF_ERROR(checked("cuPointerGetAttributes",
                          calls_->pointer_get_attributes(attributes.size(), attributes.data(),
                                                         values.data(), address)));
  info->type = type <= 3 ? static_cast<CudaMemoryType>(type) : CudaMemoryType::kUnknown;
  info->device = info->type == CudaMemoryType::kUnknown ? -1 : device;
  info->managed = managed != 0;
  return {};
}

Status CudaDriver::device_handle(int ordinal, int* device) const {
  return checked("cuDeviceGet", calls_->device_get(device, ordinal));
}

Status CudaDriver::primary_context_retain(int device, CudaContextHandle* context) const {
  return checked("cuDevicePrimaryCtxRetain", calls_->primary_ctx_retain(context, device));
}

Status CudaDriver::primary_context_release(int device) const {
  return checked("cuDevicePrimaryCtxRelease", calls_->primary_ctx_release(device));
}

Status CudaDriver::context_current(CudaContextHandle* context) const {
  return checked("cuCtxGetCurrent", calls_->ctx_get_current(context));
}

Status CudaDriver::context_push(CudaContextHandle context) const {
  return checked("cuCtxPushCurrent", calls_->ctx_push_current(context));
}

Status CudaDriver::context_pop() const {
  CudaContextHandle popped = nullptr;
  return checked("cuCtxPopCurrent", calls_->ctx_pop_current(&popped));
}

Status CudaDriver::capture_mode_exchange(int* mode) const {
  return checked("cuThreadExchangeStreamCaptureMode",
                 calls_->thread_exchange_stream_capture_mode(mode));
}

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
  CudaCopyAttributes attributes = {kSourceInStreamOrder, {}, {}, kOverlapWithCompute};
  size_t first = 0;  // from this copy on
  size_t failed = 0;
  int result = kNotSupported;
  if (calls_->memcpy_batch_async_v2 != nullptr) {
    result = calls_->memcpy_batch_async_v2(targets, sources, sizes, count, &attributes, &first, 1,
                                           stream);
  } else if (calls_->memcpy_batch_async != nullptr) {
    result = calls_->memcpy_batch_async(targets, sources, sizes, count, &attributes, &first, 1,
                                        &failed, stream);
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
