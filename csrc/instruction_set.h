// Copies and checksums by the widest instructions that the processor has, chosen once by CPUID.
//
// CRC-32C is summed by folding: a register of the message is multiplied, without carries, by a
// power of x modulo the polynomial, which moves it down the message to where it is added to the
// next one (Gopal and others, Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction, Intel, 2009). So the sum keeps up with the copy, and both take each byte from the
// same register: see kernel_loop.h.
//
// Threads: any.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace lightckpt {

// From the widest. The names are those of the instruction that sums.
enum class InstructionSet : uint32_t { kVpclmul512 = 0, kVpclmul256, kPclmul, kCrc32, kPortable };
inline constexpr uint32_t kInstructionSets = 5;

const char* name_of(InstructionSet set);

// What of the processor decides.
struct CpuFeatures {
  bool sse42 = false;  // the crc32 instruction
  bool pclmul = false;
  bool avx2 = false;
  bool vpclmul = false;
  bool avx512 = false;  // F and VL

  static CpuFeatures of_this_cpu();
};

bool has(const CpuFeatures& features, InstructionSet set);
InstructionSet widest(const CpuFeatures& features);

// Those of one set, which the processor must have; and those of the widest that it has.
const Kernels& kernels_of(InstructionSet set);
const Kernels& kernels();

}  // namespace lightckpt
