// What CUDA makes, as objects that end by themselves: a context, streams, events, memory of the
// device, pinned memory of the host, and registered memory.
//
// Invariants:
//  1. A thread has the context and the capture mode after a call of ours that it had before, on
//     every path: all that needs a context runs in CudaContext::inside. There the thread's capture
//     mode is relaxed, since otherwise our calls would break a CUDA graph that any thread captures.
//  2. An object ends in the context that made it, which must outlive it.
//
// Threads: any; one object by one at a time, a context by many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "status.h"

namespace lightckpt {

// The primary context of a device: the one that torch uses.
class CudaContext {
 public:
  static Status retain(const CudaDriver& driver, int ordinal,
                       std::unique_ptr<CudaContext>* context);
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;
  ~CudaContext() { (void)release(); }

  const CudaDriver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }

  // Runs `body`, a function without arguments that returns a Status, with this context current.
  // Returns its status, or that of coming or going.
  template <typename Body>
  Status inside(Body&& body) const {
    Entry entry;
    Status status = enter(&entry);
    if (status.ok()) status = body();
    Status left = leave(entry);
    return status.ok() ? left : status;
  }

  // Lets go of it before its end, to hear what that says.
  Status release();

 private:
  // What a thread gets back when it leaves.
  struct Entry {
    bool pushed = false;
    bool exchanged = false;
    int capture_mode = 0;
  };
  CudaContext(const CudaDriver& driver, int device, int ordinal, CudaContextHandle context)
      : driver_(driver), device_(device), ordinal_(ordinal), context_(context) {}
  Status enter(Entry* entry) const;
  Status leave(const Entry& entry) const;

  const CudaDriver& driver_;
  int device_;
  int ordinal_;
  CudaContextHandle context_;  // null: released
};

// A handle that is given back at its end. What giving it back returns then is not heard: CUDA
// returns there what went wrong before, and that was told where it was waited for. `reset` tells.
template <typename Handle, Status (CudaDriver::*kGiveBack)(Handle) const>
class CudaOwned {
 public:
  CudaOwned() = default;
  CudaOwned(const CudaContext& context, Handle handle) : context_(&context), handle_(handle) {}
  CudaOwned(CudaOwned&& other) noexcept
      : context_(std::exchange(other.context_, nullptr)), handle_(other.handle_) {}
  CudaOwned& operator=(CudaOwned&& other) noexcept {
    (void)reset();
    context_ = std::exchange(other.context_, nullptr);
    handle_ = other.handle_;
    return *this;
  }
  ~CudaOwned() { (void)reset(); }

  Handle get() const { return handle_; }
  Status reset() {
    const CudaContext* const context = std::exchange(context_, nullptr);
    if (context == nullptr) return {};
    bool reached = false;
    const auto give_back = [&] {
      reached = true;
      return (context->driver().*kGiveBack)(handle_);
    };
    Status status = context->inside(give_back);
    // Any call may return what others did wrong, also the ones that lead here.
    if (!reached) (void)context->inside(give_back);
    return status;
  }

 private:
  const CudaContext* context_ = nullptr;  // null: there is nothing
  Handle handle_{};
};

using CudaStream = CudaOwned<CudaStreamHandle, &CudaDriver::stream_destroy>;
using CudaEvent = CudaOwned<CudaEventHandle, &CudaDriver::event_destroy>;
using CudaMemory = CudaOwned<CudaPointer, &CudaDriver::memory_free>;
using CudaHostMemory = CudaOwned<void*, &CudaDriver::host_free>;
using CudaRegistered = CudaOwned<void*, &CudaDriver::host_unregister>;

Status make_stream(const CudaContext& context, CudaStream* stream);
Status make_event(const CudaContext& context, CudaEvent* event);
Status make_memory(const CudaContext& context, uint64_t bytes, CudaMemory* memory);

// Somebody's memory, made known to CUDA. Whether that works depends on what is mapped there: trying
// is the only way to know. `read_only`: the device will only read it.
Status register_memory(const CudaContext& context, void* memory, uint64_t bytes, bool read_only,
                       CudaRegistered* registered);

// Host memory that copy engines may reach, for whom to copy to or from: a copy does not cross a
// border, where one registration ends and the next begins. Who has one keeps it until its copies
// are done.
struct CudaPinned {
  std::byte* memory = nullptr;
  uint64_t bytes = 0;
  std::shared_ptr<const std::vector<uint64_t>> borders = nullptr;  // ascending; null: there is none

  uint64_t border_after(uint64_t offset) const;
};

// Memory of its own.
class CudaPinnedBuffer {
 public:
  static Status make(const CudaContext& context, uint64_t bytes, CudaPinnedBuffer* buffer);
  CudaPinned pinned() const { return {static_cast<std::byte*>(memory_.get()), bytes_}; }
  Status reset() { return memory_.reset(); }

 private:
  CudaHostMemory memory_;
  uint64_t bytes_ = 0;
};

}  // namespace lightckpt
