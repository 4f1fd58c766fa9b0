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

inline int with_stream(const char* name, Handle handle, const std::function<int(Stream*)>& body) {
  return call(name, Needs::kContext, [&] {
    Stream* const stream = world().stream_of(handle);
    return stream != nullptr ? body(stream) : kInvalidHandle;
  });
}

}  // namespace fake_cuda
