// What this CPU and this operating system let us execute.
#pragma once

#include <string>

namespace coattn {

struct CpuFeatures {
  bool avx2 = false;    // AVX2 + FMA + F16C, with the OS saving ymm
  bool avx512 = false;  // F + BW + VL + DQ, with the OS saving zmm
  bool avx512_bf16 = false;
  bool avx512_vnni = false;
  bool amx_bf16 = false;       // tiles + bf16 + int8, and the kernel granted tile state to this process
  std::string amx_reason;      // why amx_bf16 is false; empty when it is true
  bool neon = false;           // every 64-bit ARM CPU
  bool dotprod = false;        // products of bytes (SDOT): an option of ARMv8.2
  std::string dotprod_reason;  // why dotprod is false; empty when it is true
  std::string name;            // brand string, or the architecture
};

// Detected once, less what the environment variable COATTN_HIDE_ISA names (for tests). Asking for AMX
// permission is a process-wide side effect of the first call (Linux arch_prctl).
const CpuFeatures& cpu_features();

}  // namespace coattn
