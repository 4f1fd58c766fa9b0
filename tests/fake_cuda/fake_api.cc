// The fake driver's calls on devices, contexts, streams and events, under the names and with the
// signatures of cuda.h. See fake_cuda.h.
#include <cstdio>
#include <utility>

#include "fake_calls.h"

namespace {

using fake_cuda::call;
using fake_cuda::give_back;
using fake_cuda::Handle;
using fake_cuda::Needs;
using fake_cuda::Op;
using fake_cuda::Record;
using fake_cuda::refuse_legacy;
using fake_cuda::Stream;
using fake_cuda::When;
using fake_cuda::with_stream;
using fake_cuda::world;
using fake_cuda::World;
using Lock = World::Lock;

constexpr int kPriorityHighest = -5;

}  // namespace

FAKE_CUDA_EXPORT int cuInit(unsigned) {
  return call("cuInit", Needs::kNothing, [] {
    if (world().options().devices == 0) return fake_cuda::kNoDevice;
    world().initialised = true;
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuGetErrorName(int result, const char** name) {
  switch (result) {
    case fake_cuda::kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return fake_cuda::kOk;
    case fake_cuda::kOutOfMemory:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return fake_cuda::kOk;
    case fake_cuda::kIllegalAddress:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return fake_cuda::kOk;
    default:
      *name = nullptr;
      return fake_cuda::kInvalidValue;
  }
}

FAKE_CUDA_EXPORT int cuGetErrorString(int result, const char** text) {
  *text = result == fake_cuda::kOutOfMemory ? "out of memory" : nullptr;
  return *text != nullptr ? fake_cuda::kOk : fake_cuda::kInvalidValue;
}

FAKE_CUDA_EXPORT int cuDriverGetVersion(int* version) {
  return call("cuDriverGetVersion", Needs::kNothing, [&] {
    *version = 13000;
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuDeviceGet(int* device, int ordinal) {
  return call("cuDeviceGet", Needs::kInit, [&] {
    if (ordinal < 0 || ordinal >= world().options().devices) return fake_cuda::kInvalidDevice;
    *device = ordinal + 100;  // not the ordinal, so that no one takes one for the other
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuDeviceGetCount(int* count) {
  return call("cuDeviceGetCount", Needs::kInit, [&] {
    *count = world().options().devices;
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuDeviceGetName(char* name, int bytes, int device) {
  return call("cuDeviceGetName", Needs::kInit, [&] {
    std::snprintf(name, static_cast<size_t>(bytes), "Fake GPU %d", device - 100);
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return call("cuDeviceGetAttribute", Needs::kInit, [&] {
    const auto& known = world().attributes;
    const auto found = known.find({device - 100, attribute});
    if (found == known.end()) return fake_cuda::kInvalidValue;
    *value = found->second;
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuDevicePrimaryCtxRetain(Handle* context, int device) {
  return call("cuDevicePrimaryCtxRetain", Needs::kInit, [&] {
    *context = world().retain(device - 100);
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  return give_back("cuDevicePrimaryCtxRelease", Needs::kInit,
                   [&] { return world().release(device - 100); });
}

FAKE_CUDA_EXPORT int cuCtxGetCurrent(Handle* context) {
  return call("cuCtxGetCurrent", Needs::kInit, [&] {
    const auto& stack = fake_cuda::context_stack();
    *context = stack.empty() ? 0 : stack.back();
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuCtxPushCurrent_v2(Handle context) {
  return call("cuCtxPushCurrent", Needs::kInit, [&] {
    if (!world().contexts.contains(context)) {
      return world().misuse("a context that is not there", fake_cuda::kInvalidContext);
    }
    fake_cuda::context_stack().push_back(context);
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuCtxPopCurrent_v2(Handle* context) {
  const When when = world().options().pop_fails_late != 0 ? When::kAfter : When::kBefore;
  return world().call("cuCtxPopCurrent", Needs::kInit, when, [&](Lock&) {
    auto& stack = fake_cuda::context_stack();
    if (stack.empty()) return world().misuse("a context too many goes", 201);
    *context = stack.back();
    stack.pop_back();
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return call("cuCtxGetStreamPriorityRange", Needs::kContext, [&] {
    *least = 0;
    *greatest = kPriorityHighest;
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  return call("cuThreadExchangeStreamCaptureMode", Needs::kInit, [&] {
    std::swap(*mode, fake_cuda::capture_mode());
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuStreamCreateWithPriority(Handle* stream, unsigned flags, int priority) {
  return call("cuStreamCreateWithPriority", Needs::kContextUnsafeInCapture, [&] {
    const bool blocking = (flags & 1) == 0;
    const bool highest = !blocking && priority == kPriorityHighest;
    const Stream::Kind kind = {.counted = true, .highest = highest, .blocking = blocking};
    *stream = world().make_stream(world().current(), kind);
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuStreamDestroy_v2(Handle handle) {
  return give_back("cuStreamDestroy", Needs::kContext, [&] {
    if (world().stream_of(handle) == nullptr) return fake_cuda::kInvalidHandle;
    world().end_stream(handle);
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuStreamQuery(Handle handle) {
  return world().call("cuStreamQuery", Needs::kContextUnsafeInCapture, When::kBefore, [&](Lock&) {
    if (const int refused = refuse_legacy(handle); refused != fake_cuda::kOk) return refused;
    Stream* const stream = world().stream_of(handle);
    if (stream == nullptr) return fake_cuda::kInvalidHandle;
    return stream->ops.empty() ? fake_cuda::kOk : fake_cuda::kNotReady;
  });
}

FAKE_CUDA_EXPORT int cuStreamSynchronize(Handle handle) {
  const auto body = [&](Lock& lock) {
    if (const int refused = refuse_legacy(handle); refused != fake_cuda::kOk) return refused;
    Stream* const stream = world().stream_of(handle);
    if (stream == nullptr) return fake_cuda::kInvalidHandle;
    world().wait_through(lock, stream);
    return fake_cuda::kOk;
  };
  return world().call("cuStreamSynchronize", Needs::kContextUnsafeInCapture, When::kBefore, body);
}

FAKE_CUDA_EXPORT int cuStreamWaitEvent(Handle handle, Handle event_handle, unsigned flags) {
  return with_stream("cuStreamWaitEvent", handle, [&](Stream* stream, Lock&) {
    fake_cuda::Event* const event = world().event_of(event_handle);
    if (event == nullptr) return fake_cuda::kInvalidHandle;
    if (flags != 0) return fake_cuda::kInvalidValue;
    if (stream->capturing) return world().misuse("a wait into a graph", fake_cuda::kOk);
    // Of the recording that is the newest now, whatever the event is recorded for later.
    if (event->record != nullptr) {
      world().enqueue(stream, {Op::Kind::kWait, {}, event->record});
    } else {
      world().misuse("a wait for an event that was never recorded", fake_cuda::kOk);
    }
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuStreamIsCapturing(Handle handle, int* status) {
  return call("cuStreamIsCapturing", Needs::kContext, [&] {
    if (const int refused = refuse_legacy(handle, true); refused != fake_cuda::kOk) return refused;
    const Stream* const stream = world().stream_of(handle);
    if (stream == nullptr) return fake_cuda::kInvalidHandle;
    *status = stream->capturing ? 1 : 0;
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuEventCreate(Handle* event, unsigned flags) {
  return call("cuEventCreate", Needs::kContext, [&] {
    if (flags != 2) world().misuse("an event with times", fake_cuda::kOk);
    *event = world().new_handle();
    world().events[*event].context = world().current();
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuEventDestroy_v2(Handle event) {
  return give_back("cuEventDestroy", Needs::kContext, [&] {
    if (world().event_of(event) == nullptr) return fake_cuda::kInvalidHandle;
    world().events.erase(event);
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuEventRecord(Handle event_handle, Handle handle) {
  return with_stream("cuEventRecord", handle, [&](Stream* stream, Lock&) {
    fake_cuda::Event* const event = world().event_of(event_handle);
    if (event == nullptr) return fake_cuda::kInvalidHandle;
    if (event->context != stream->context) {
      return world().misuse("an event of another context", fake_cuda::kInvalidHandle);
    }
    if (stream->capturing) return world().misuse("an event into a graph", fake_cuda::kOk);
    event->record = std::make_shared<Record>();
    world().enqueue(stream, {Op::Kind::kRecord, {}, event->record});
    return fake_cuda::kOk;
  });
}

FAKE_CUDA_EXPORT int cuEventQuery(Handle handle) {
  return call("cuEventQuery", Needs::kContextUnsafeInCapture, [&] {
    const fake_cuda::Event* const event = world().event_of(handle);
    if (event == nullptr) return fake_cuda::kInvalidHandle;
    const bool done = event->record == nullptr || event->record->done;
    return done ? fake_cuda::kOk : fake_cuda::kNotReady;
  });
}

FAKE_CUDA_EXPORT int cuEventSynchronize(Handle handle) {
  const auto body = [&](Lock& lock) {
    const fake_cuda::Event* const event = world().event_of(handle);
    if (event == nullptr) return fake_cuda::kInvalidHandle;
    const auto record = event->record;
    world().wait_for(lock, [&] { return record == nullptr || record->done; });
    return fake_cuda::kOk;
  };
  return world().call("cuEventSynchronize", Needs::kContextUnsafeInCapture, When::kBefore, body);
}
