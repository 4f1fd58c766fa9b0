// How the fake driver's calls are written: as functions on its world, with its mutex held.
#pragma once

#include <functional>

#include "fake_world.h"

namespace fake_cuda {

inline World& world() { return World::get(); }

inline int call(const char* name, Needs needs, const std::function<int()>& body) {
  return world().call(name, needs, When::kBefore, [&](World::Lock&) { return body(); });
}

// One that gives something back: an error comes after it.
inline int give_back(const char* name, Needs needs, const std::function<int()>& body) {
  return world().call(name, needs, When::kAfter, [&](World::Lock&) { return body(); });
}

// Whoever uses the legacy stream while a blocking one is captured breaks the capture, as far as
// that is more than to ask (cuStreamIsCapturing, and the CUDA programming guide's prohibited
// operations).
inline int refuse_legacy(Handle handle, bool asks = false) {
  if (handle > 1 || !world().captures_blocking()) return kOk;
  if (!asks) ++world().broken_captures;
  return kCaptureImplicit;
}

inline int with_stream(const char* name, Handle handle,
                       const std::function<int(Stream*, World::Lock&)>& body) {
  return world().call(name, Needs::kContext, When::kBefore, [&](World::Lock& lock) {
    if (const int refused = refuse_legacy(handle); refused != kOk) return refused;
    Stream* const stream = world().stream_of(handle);
    return stream != nullptr ? body(stream, lock) : kInvalidHandle;
  });
}

// One that makes memory known to the driver, or lets it go. A driver may wait for the device there
// (implicit synchronization in the CUDA programming guide); that of a lost context does not.
inline int with_memory(const char* name, Needs needs, When when, const std::function<int()>& body) {
  return world().call(name, needs, when, [&](World::Lock& lock) {
    const bool lost = world().contexts[world().current()].lost != kOk;
    if (world().rules.memory_waits != 0 && !lost) world().wait_through_all(lock);
    return body();
  });
}

}  // namespace fake_cuda
