// A driver with a fault, on top of the fake one that it is linked to: FAULTY_CALL names one of the
// calls below, and FAULTY_HOW what it does instead of its work:
//
//   hang     stands at the gate FAULTY_GATE, a named pipe, until its writer has closed it
//   crash    aborts
//   nothing  returns as if it had been done
//   zero     writes 0 where the answer belongs
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace {

bool is(const char* variable, const char* value) {
  const char* const set = std::getenv(variable);
  return set != nullptr && std::string(set) == value;
}

// Is the fault of this call? Then it has happened, but for the answer.
bool fails(const char* name) {
  if (!is("FAULTY_CALL", name)) return false;
  if (is("FAULTY_HOW", "crash")) std::abort();
  if (is("FAULTY_HOW", "hang")) {
    const int gate = open(std::getenv("FAULTY_GATE"), O_RDONLY);
    char byte = 0;
    while (read(gate, &byte, 1) > 0) {
    }
    close(gate);
  }
  return true;
}

// The fake's own: it comes next behind this library, which is linked to it.
template <typename... Arguments>
int real(const char* name, Arguments... arguments) {
  const auto call = reinterpret_cast<int (*)(Arguments...)>(dlsym(RTLD_NEXT, name));
  return call != nullptr ? call(arguments...) : 801;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int cuMemHostRegister_v2(uint64_t memory, size_t bytes,
                                                                unsigned flags) {
  if (fails("cuMemHostRegister_v2")) return 0;
  return real("cuMemHostRegister_v2", memory, bytes, flags);
}

__attribute__((visibility("default"))) int cuMemcpyBatchAsync_v2(
    uint64_t* targets, uint64_t* sources, size_t* sizes, size_t count, void* attributes,
    size_t* indexes, size_t attribute_count, uint64_t stream) {
  if (fails("cuMemcpyBatchAsync_v2")) return 0;
  return real("cuMemcpyBatchAsync_v2", targets, sources, sizes, count, attributes, indexes,
              attribute_count, stream);
}

__attribute__((visibility("default"))) int cuMemcpyDtoHAsync_v2(uint64_t target, uint64_t source,
                                                                size_t bytes, uint64_t stream) {
  if (fails("cuMemcpyDtoHAsync_v2")) return 0;
  return real("cuMemcpyDtoHAsync_v2", target, source, bytes, stream);
}

__attribute__((visibility("default"))) int cuDeviceGetAttribute(int* value, int attribute,
                                                                int device) {
  if (fails("cuDeviceGetAttribute")) {
    *value = 0;
    return 0;
  }
  *value = 1;
  const int result = real("cuDeviceGetAttribute", value, attribute, device);
  return result == 801 ? 0 : result;
}

}  // extern "C"
