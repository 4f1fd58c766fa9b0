// Opening libcuda, what its errors become, and the calls on devices and contexts. See
// cuda_driver.h.
#include "cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

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
constexpr int kMemoryType = 2;
constexpr int kIsManaged = 8;
constexpr int kDeviceOrdinal = 9;

bool loses_the_context(int result) {
  constexpr std::array kLost = {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721};
  return std::ranges::find(kLost, result) != kLost.end();
}

// What the environment says of copies in batches; anything but the two answers is a mistake of
// somebody who counts on one of them.
Status batch_switch(bool* on) {
  const char* const words = std::getenv(kCudaBatchSwitch);
  const std::string_view text(words != nullptr ? words : "");
  *on = text == "1";
  if (*on || text.empty() || text == "0") return {};
  return {Code::kInvalid, std::string(kCudaBatchSwitch) + " is '" + words +
                              "': it is 1 where the probe has shown that cuMemcpyBatchAsync is "
                              "quicker and does not fail, else 0 or not set"};
}

}  // namespace

template <typename Take>
void CudaCalls::find_work(const Take& take) {
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

const char* CudaCalls::find(void* library) {
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
  take(&device_get_attribute, "cuDeviceGetAttribute");
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

CudaDriver::CudaDriver(std::unique_ptr<CudaCalls> calls, bool in_batches)
    : calls_(std::move(calls)), in_batches_(in_batches) {}
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
  bool in_batches = false;
  if (const char* missing = calls->find(handle); missing != nullptr) {
    dlclose(handle);
    return {Code::kNotFound,
            std::string(name) + " has no " + missing + ": drivers have it from CUDA 11.0 on"};
  }
  if (Status status = batch_switch(&in_batches); !status.ok()) {
    dlclose(handle);
    return status;
  }
  driver->reset(new CudaDriver(std::move(calls), in_batches));
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

Status CudaDriver::device_attribute(int ordinal, CudaAttribute attribute, int* value) const {
  int device = 0;
  RETURN_IF_ERROR(device_handle(ordinal, &device));
  return checked("cuDeviceGetAttribute",
                 calls_->device_get_attribute(value, static_cast<int>(attribute), device));
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

}  // namespace lightckpt
