// Which set a processor gets. See instruction_set.h.
#include "instruction_set.h"

#include <array>
#include <atomic>

#include "kernel_sets.h"
#include "status.h"

namespace lightckpt {
namespace {

constexpr std::array<const char*, kInstructionSets> kNames = {"vpclmul-512", "vpclmul-256",
                                                              "pclmul", "crc32", "portable"};

// Constants, so that nothing is left to be initialised when another thread forks.
constexpr std::array<Kernels, kInstructionSets> kSets =
    kernel_sets::make_all<kernel_sets::NoHook>();

constinit std::atomic<const Kernels*> chosen = nullptr;

}  // namespace

CpuFeatures CpuFeatures::of_this_cpu() {
  CpuFeatures features;
#if defined(__x86_64__)
  // These know also whether the kernel saves the wide registers.
  __builtin_cpu_init();
  features.sse42 = __builtin_cpu_supports("sse4.2");
  features.pclmul = __builtin_cpu_supports("pclmul");
  features.avx2 = __builtin_cpu_supports("avx2");
  features.vpclmul = __builtin_cpu_supports("vpclmulqdq");
  features.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
#endif
  return features;
}

const char* name_of(InstructionSet set) { return kNames[static_cast<size_t>(set)]; }

// What a set does not need by its name it needs for what is too little to fold.
bool has(const CpuFeatures& cpu, InstructionSet set) {
  switch (set) {
    case InstructionSet::kVpclmul512:
      return cpu.avx512 && cpu.vpclmul && has(cpu, InstructionSet::kPclmul);
    case InstructionSet::kVpclmul256:
      return cpu.avx2 && cpu.vpclmul && has(cpu, InstructionSet::kPclmul);
    case InstructionSet::kPclmul:
      return cpu.pclmul && has(cpu, InstructionSet::kCrc32);
    case InstructionSet::kCrc32:
      return cpu.sse42;
    case InstructionSet::kPortable:
      return true;
  }
  CHECK(false);
}

InstructionSet widest(const CpuFeatures& cpu) {
  uint32_t set = 0;
  while (!has(cpu, static_cast<InstructionSet>(set))) ++set;
  return static_cast<InstructionSet>(set);
}

const Kernels& kernels_of(InstructionSet set) { return kSets[static_cast<size_t>(set)]; }

const Kernels& kernels() {
  // Two threads may both look; they find the same.
  const Kernels* known = chosen.load(std::memory_order_relaxed);
  if (known == nullptr) {
    known = &kernels_of(widest(CpuFeatures::of_this_cpu()));
    chosen.store(known, std::memory_order_relaxed);
  }
  return *known;
}

}  // namespace lightckpt
