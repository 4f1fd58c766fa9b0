// See dma.h.
#include "dma.h"

#include <cstring>
#include <string_view>

#include "cuda_driver.h"
#include "fake_cuda.h"

namespace lightckpt {
namespace {

const CudaDriver& driver() {
  static const std::unique_ptr<CudaDriver> loaded = [] {
    std::unique_ptr<CudaDriver> found;
    CHECK(CudaDriver::load(FAKE_CUDA, &found).ok() && found->init().ok());
    return found;
  }();
  return *loaded;
}

}  // namespace

Dma::Dma(Engine* engine) : engine_(engine) {
  CHECK(driver().init().ok());
  DeviceInfo info;
  CHECK(CudaContext::retain(driver(), 0, &context_).ok());
  constexpr int64_t kPatienceNs = 60'000'000'000;  // a life has the same events each time
  CHECK(engine->open_device(driver(), 0, {Gpu::kPieceBytes, kPatienceNs}, &info).ok());
  CHECK(info.direct.ok());
}

Dma::~Dma() {
  memory_.clear();
  context_.reset();
  fake_cuda_finish();
  CHECK(std::string_view(fake_cuda_misuse()).empty());
  // The streams of this life have ended, and their threads go with them.
  const FakeCudaOptions options = {.delay_us_max = 0};
  fake_cuda_reset(&options);
}

uint64_t Dma::write(uint32_t extent, Bytes bytes) {
  CHECK(make_memory(*context_, bytes.size() + 1, &memory_.emplace_back()).ok());
  const CudaPointer copy = memory_.back().get();
  if (!bytes.empty()) std::memcpy(fake_cuda_memory(copy), bytes.data(), bytes.size());
  const std::vector<Span> spans = {{reinterpret_cast<std::byte*>(copy), extent, 0}};
  uint64_t batch = 0;
  CHECK(engine_->submit_on({0, 0, Snapshot::kDirect}, Op::kWrite, 0, spans, &batch).ok());
  return batch;
}

}  // namespace lightckpt
