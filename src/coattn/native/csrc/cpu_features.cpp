#include "cpu_features.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace coattn {
namespace {

#if defined(__x86_64__)

struct Regs {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Regs cpuid(uint32_t leaf, uint32_t sub = 0) {
  Regs r;
  if (__get_cpuid_max(leaf & 0x80000000u, nullptr) < leaf) return r;
  __cpuid_count(leaf, sub, r.eax, r.ebx, r.ecx, r.edx);
  return r;
}

bool bit(uint32_t word, int index) {
  return (word >> index) & 1u;
}

uint64_t xcr0() {
  uint32_t lo = 0, hi = 0;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (uint64_t{hi} << 32) | lo;
}

// Linux hands out the 8 KiB of tile state only to processes that ask (Documentation/arch/x86/xstate.rst).
bool request_tiles() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0;
}

std::string brand() {
  char text[49] = {};
  if (cpuid(0x80000000u).eax < 0x80000004u) return "x86_64";
  for (uint32_t i = 0; i < 3; ++i) {
    Regs r = cpuid(0x80000002u + i);
    std::memcpy(text + 16 * i, &r, 16);
  }
  std::string name = text;
  while (!name.empty() && name.back() == ' ') name.pop_back();
  return name.empty() ? "x86_64" : name;
}

CpuFeatures detect() {
  CpuFeatures f;
  f.name = brand();
  const Regs l1 = cpuid(1), l7 = cpuid(7), l71 = cpuid(7, 1);
  const bool osxsave = bit(l1.ecx, 27);
  const uint64_t saved = osxsave ? xcr0() : 0;
  const bool ymm = (saved & 0x6) == 0x6;
  const bool zmm = (saved & 0xe6) == 0xe6;
  const bool tiles = (saved & 0x60000) == 0x60000;
  f.avx2 = ymm && bit(l1.ecx, 28) && bit(l7.ebx, 5) && bit(l1.ecx, 12) && bit(l1.ecx, 29);
  f.avx512 = f.avx2 && zmm && bit(l7.ebx, 16) && bit(l7.ebx, 30) && bit(l7.ebx, 31) && bit(l7.ebx, 17);
  f.avx512_bf16 = f.avx512 && bit(l71.eax, 5);
  f.avx512_vnni = f.avx512 && bit(l7.ecx, 11);
  if (!(bit(l7.edx, 24) && bit(l7.edx, 22) && bit(l7.edx, 25))) {
    f.amx_reason = "the CPU has no AMX tiles with bf16 and int8";
  } else if (!tiles) {
    f.amx_reason = "the operating system does not save AMX tile state";
  } else if (!request_tiles()) {
    f.amx_reason = "the kernel refused this process AMX tile state";
  } else {
    f.amx_bf16 = true;
  }
  return f;
}

#else

CpuFeatures detect() {
  CpuFeatures f;
#if defined(__aarch64__)
  f.name = "aarch64";
  f.neon = true;
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  f.dotprod = (getauxval(AT_HWCAP) & kDotProducts) != 0;
  if (!f.dotprod) f.dotprod_reason = "the CPU has no products of bytes (SDOT)";
#else
  f.name = "unknown";
#endif
  f.amx_reason = "AMX exists on x86-64 only";
  return f;
}

#endif

// COATTN_HIDE_ISA=amx,avx512: pretend that the machine lacks them, for tests of what happens where it does.
// What builds on a hidden one is hidden with it.
CpuFeatures visible() {
  CpuFeatures f = detect();
  const char* hidden = std::getenv("COATTN_HIDE_ISA");
  if (!hidden) return f;
  const auto hides = [&](const char* name) {
    const size_t length = std::strlen(name);
    for (const char* at = hidden; (at = std::strstr(at, name)); at += length) {
      if ((at == hidden || at[-1] == ',') && (at[length] == 0 || at[length] == ',')) return true;
    }
    return false;
  };
  const bool avx2 = hides("avx2"), avx512 = avx2 || hides("avx512"), amx = avx512 || hides("amx");
  if (avx2) f.avx2 = false;
  if (avx512) f.avx512 = f.avx512_bf16 = f.avx512_vnni = false;
  const bool neon = hides("neon"), dotprod = neon || hides("dotprod");
  if (neon) f.neon = false;
  if (dotprod && f.dotprod) {
    f.dotprod = false;
    f.dotprod_reason = "COATTN_HIDE_ISA hides it";
  }
  if (amx && f.amx_bf16) {
    f.amx_bf16 = false;
    f.amx_reason = "COATTN_HIDE_ISA hides it";
  }
  return f;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = visible();
  return features;
}

}  // namespace coattn
