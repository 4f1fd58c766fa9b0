// What CUDA 13 has beside the calls of before: a batch of copies without the argument that says
// which of them failed. By itself, on top of the rest, so that there is a driver with it and one
// without.
#include <stddef.h>

#include "fake_cuda.h"

FAKE_CUDA_EXPORT int cuMemcpyBatchAsync(uint64_t* targets, uint64_t* sources, size_t* sizes,
                                        size_t count, void* attributes, size_t* indexes,
                                        size_t attribute_count, size_t* failed, uint64_t stream);

FAKE_CUDA_EXPORT int cuMemcpyBatchAsync_v2(uint64_t* targets, uint64_t* sources, size_t* sizes,
                                           size_t count, void* attributes, size_t* indexes,
                                           size_t attribute_count, uint64_t stream) {
  size_t failed = 0;
  return cuMemcpyBatchAsync(targets, sources, sizes, count, attributes, indexes, attribute_count,
                            &failed, stream);
}
