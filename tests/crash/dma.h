// A GPU's copy engine that writes extents into the media itself: tests/fake_cuda, asked through the
// core's own path. What it writes no one sees but by dma_done.
#pragma once

#include "engine.h"

namespace lightckpt {

class Dma {
 public:
  // Makes the engine ready for it. The engine ends before it.
  explicit Dma(Engine* engine);
  Dma(const Dma&) = delete;
  Dma& operator=(const Dma&) = delete;
  ~Dma();
  // Queues one extent of the attempt, from a copy in the device's memory.
  uint64_t write(uint32_t extent, Bytes bytes);

 private:
  Engine* engine_;
  std::unique_ptr<CudaContext> context_;
  std::vector<CudaMemory> memory_;  // until the end: copies are late
};

}  // namespace lightckpt
