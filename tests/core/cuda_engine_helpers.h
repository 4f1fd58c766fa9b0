// An engine with the fake GPU, and the tensors on it that versions are made of.
#pragma once

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_helpers.h"
#include "engine_helpers.h"

namespace lightckpt {

inline constexpr Snapshot kAll[] = {Snapshot::kHost, Snapshot::kDirect, Snapshot::kDevice};
inline const std::vector<uint64_t> kSizes = {70'000, 0,  300,     kChunkBytes + 17,
                                             1,      64, 5 << 20, 2000};
inline constexpr uint64_t kRing = Gpu::kPieceBytes;  // one piece: most batches are larger

// The extents of a state as tensors on the device.
class Tensors {
 public:
  explicit Tensors(const CudaDriver& driver, std::vector<uint64_t> sizes, int ordinal = 0)
      : sizes_(std::move(sizes)) {
    EXPECT_TRUE(is_ok(CudaContext::retain(driver, ordinal, &context_)));
    for (const uint64_t bytes : sizes_) {
      CudaMemory memory;
      EXPECT_TRUE(is_ok(make_memory(*context_, bytes + 1, &memory)));
      memory_.push_back(std::move(memory));
    }
    fill(0);
  }
  ~Tensors() { fake_cuda_settle(); }  // kernels that nobody waited for

  std::vector<Span> spans() const {
    std::vector<Span> found;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      auto* const device = reinterpret_cast<std::byte*>(memory_[i].get());
      found.push_back({device, static_cast<uint32_t>(i), 0});
    }
    return found;
  }
  std::span<std::byte> at(size_t i) const {
    return {static_cast<std::byte*>(fake_cuda_memory(memory_[i].get())), sizes_[i]};
  }
  void fill(int value) const {
    for (size_t i = 0; i < sizes_.size(); ++i) std::memset(at(i).data(), value, sizes_[i]);
  }
  void take(const State& state) const {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      if (sizes_[i] > 0) std::memcpy(at(i).data(), state.extents[i].data(), sizes_[i]);
    }
  }
  bool holds(const State& state) const {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      if (sizes_[i] == 0) continue;
      if (std::memcmp(at(i).data(), state.extents[i].data(), sizes_[i]) != 0) return false;
    }
    return true;
  }

 private:
  std::vector<uint64_t> sizes_;
  std::unique_ptr<CudaContext> context_;
  std::vector<CudaMemory> memory_;
};

class CudaEngine : public FakeCuda {
 protected:
  Status open(TestEngine* engine, DeviceInfo* info = nullptr, int ordinal = 0,
              int64_t patience_ns = kDeadlineNs) {
    DeviceInfo unused;
    return (*engine)->open_device(*driver, ordinal, {kRing, patience_ns},
                                  info != nullptr ? info : &unused);
  }
  static Status submit(TestEngine* engine, Op op, uint64_t version, Snapshot how, uint64_t stream,
                       const Tensors& tensors, uint64_t* batch, int ordinal = 0) {
    return (*engine)->submit_on({ordinal, stream, how}, op, version, tensors.spans(), batch);
  }
  static Status write(TestEngine* engine, Snapshot how, uint64_t stream, const Tensors& tensors,
                      uint64_t* batch) {
    return submit(engine, Op::kWrite, 0, how, stream, tensors, batch);
  }
};

}  // namespace lightckpt
