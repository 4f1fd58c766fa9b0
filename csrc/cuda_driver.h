// CudaDriver: the calls of CUDA's driver API that copies need, each checked.
//
// The library is opened at run time, if it is there: nothing of CUDA is needed to build, and one
// build runs with every driver from CUDA 11 on.
//
// Errors. A CUresult becomes a Status that names the call, the error and CUDA's words for it. Out
// of memory is kNoSpace; no device, no driver and "not found" are kNotFound; all else is kIo. A
// call of the driver API keeps no error behind: torch's cudaGetLastError does not show ours. What
// stays is a context that is lost: after an error that a kernel or the hardware caused (illegal
// address 700, launch timeout 702, assert 710, hardware stack 714 to unspecified launch failure
// 719, tensor memory 721, uncorrectable ECC 214, NVLink 220, contained 226) every later call
// returns it, and only a new process helps. Nothing here causes one: a copy names memory that is
// there until it is done (CudaDevice). When one shows up it is somebody's before us; the message
// says so.
//
// What the calls make, as objects that end by themselves: cuda_objects.h.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda_calls.h"
#include "status.h"

namespace lightckpt {

inline constexpr char kCudaLibrary[] = "libcuda.so.1";
// An environment variable: 1 lets copies go to the driver in batches, by cuMemcpyBatchAsync. There
// are drivers on which that call crashes, or hangs; so it is for who has seen it do neither there.
inline constexpr char kCudaBatchSwitch[] = "LIGHTCKPT_CUDA_BATCH";

inline constexpr int kCudaCaptureRelaxed = 2;  // CUstreamCaptureMode

// CUdevice_attribute: what a device can, 0 or 1.
enum class CudaAttribute : int {
  kHostPointers = 91,          // a host address of registered memory is one for the device as well
  kRegistration = 99,          // memory of the host can be registered
  kReadOnlyRegistration = 113  // and such that may only be read
};

enum class CudaMemoryType : uint32_t { kUnknown = 0, kHost = 1, kDevice = 2, kArray = 3 };

struct CudaPointerInfo {
  CudaMemoryType type = CudaMemoryType::kUnknown;  // kUnknown: pageable, or nobody's
  int device = -1;
  bool managed = false;
};

class CudaDriver {
 public:
  // As many as the probe gives a driver, whose word counts for no more: there are reports of
  // drivers that fall over tens of thousands.
  static constexpr size_t kManyMax = 128;

  // The library, opened and initialised at the first call, and never closed. kNotFound: there is no
  // driver, or no device; the message says which. kInvalid: kCudaBatchSwitch is neither 1 nor 0.
  static Status load(const CudaDriver** driver);
  // The same for a library of another name, not yet initialised.
  static Status load(const char* name, std::unique_ptr<CudaDriver>* driver);
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;
  ~CudaDriver();

  Status init() const;
  Status version(int* version) const;  // 12040 is CUDA 12.4
  Status device_count(int* count) const;
  Status device_name(int ordinal, std::string* name) const;
  Status device_attribute(int ordinal, CudaAttribute attribute, int* value) const;
  // Says of an address what CUDA knows of it; one that it does not know is no error.
  Status pointer_info(CudaPointer address, CudaPointerInfo* info) const;

  // For CudaContext.
  Status device_handle(int ordinal, int* device) const;
  Status primary_context_retain(int device, CudaContextHandle* context) const;
  Status primary_context_release(int device) const;
  Status context_current(CudaContextHandle* context) const;  // null: none
  Status context_push(CudaContextHandle context) const;
  Status context_pop() const;
  Status capture_mode_exchange(int* mode) const;

  // All below: inside a context. None waits for the device but the two that say so.

  // A stream of the highest priority that does not wait for the legacy stream.
  Status stream_create(CudaStreamHandle* stream) const;
  Status stream_destroy(CudaStreamHandle stream) const;
  Status stream_query(CudaStreamHandle stream, bool* done) const;
  Status stream_synchronize(CudaStreamHandle stream) const;  // waits, without end
  Status stream_wait_event(CudaStreamHandle stream, CudaEventHandle event) const;
  // Is what the stream is given recorded into a CUDA graph, instead of run?
  Status stream_capturing(CudaStreamHandle stream, bool* capturing) const;

  Status event_create(CudaEventHandle* event) const;  // without times
  Status event_destroy(CudaEventHandle event) const;
  Status event_record(CudaEventHandle event, CudaStreamHandle stream) const;
  Status event_query(CudaEventHandle event, bool* done) const;
  Status event_synchronize(CudaEventHandle event) const;  // waits, without end

  // Host memory must be pinned, or the call blocks.
  Status copy_to_host(void* target, CudaPointer source, uint64_t bytes,
                      CudaStreamHandle stream) const;
  Status copy_to_device(CudaPointer target, const void* source, uint64_t bytes,
                        CudaStreamHandle stream) const;
  Status copy_on_device(CudaPointer target, CudaPointer source, uint64_t bytes,
                        CudaStreamHandle stream) const;

  // May copy_many be called, as kCudaBatchSwitch had it when the library was opened?
  bool in_batches() const { return in_batches_; }
  // At most kManyMax at once, in no order among themselves, between addresses of either side; not
  // on the legacy stream. kNotFound: this driver cannot (from CUDA 12.8 on they can).
  Status copy_many(CudaPointer* targets, CudaPointer* sources, size_t* sizes, size_t count,
                   CudaStreamHandle stream) const;

  Status memory_allocate(uint64_t bytes, CudaPointer* memory) const;
  Status memory_free(CudaPointer memory) const;
  Status host_allocate(uint64_t bytes, void** memory) const;  // pinned, for every context
  Status host_free(void* memory) const;
  Status host_register(void* memory, uint64_t bytes, bool read_only) const;  // for every context
  Status host_unregister(void* memory) const;

 private:
  CudaDriver(std::unique_ptr<CudaCalls> calls, bool in_batches);
  Status checked(const char* call, int result) const;
  Status queried(const char* call, int result, bool* done) const;

  std::unique_ptr<CudaCalls> calls_;
  const bool in_batches_;
};

}  // namespace lightckpt
