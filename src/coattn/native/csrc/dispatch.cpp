#include "dispatch.h"

#include <atomic>

#include "cpu_features.h"
#include "errors.h"

namespace coattn {
namespace {

struct Candidate {
  const char* name;
  std::string reason;
  const Kernels& (*table)();
};

const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> list = [] {
    std::vector<Candidate> c{{"generic", "", generic_kernels}};
#if defined(__x86_64__) && !defined(COATTN_GENERIC)
    const CpuFeatures& f = cpu_features();
    std::string avx512;
    if (!f.avx512) {
      avx512 = "the CPU or the operating system lacks AVX-512 F, BW, VL or DQ";
    } else if (!f.avx512_bf16 || !f.avx512_vnni) {
      avx512 = std::string("the CPU has AVX-512 without ") + (f.avx512_bf16 ? "VNNI" : "BF16");
    }
    c.push_back(
        {"avx2", f.avx2 ? "" : "the CPU or the operating system lacks AVX2, FMA or F16C", avx2_kernels});
    c.push_back({"avx512", avx512, avx512_kernels});
    c.push_back({"amx", !avx512.empty() ? avx512 : f.amx_reason, amx_kernels});
#elif defined(__aarch64__) && !defined(COATTN_GENERIC)
    const CpuFeatures& f = cpu_features();
    c.push_back({"neon", f.neon ? "" : "COATTN_HIDE_ISA hides it", neon_kernels});
    c.push_back({"dotprod", f.dotprod_reason, dotprod_kernels});
#else
    for (const char* name : {"avx2", "avx512", "amx", "neon", "dotprod"}) {
      c.push_back({name, "coattn was built without them", generic_kernels});
    }
#endif
    return c;
  }();
  return list;
}

std::atomic<const Kernels*> forced{nullptr};

}  // namespace

std::vector<IsaStatus> isas() {
  std::vector<IsaStatus> out;
  for (const Candidate& c : candidates()) out.push_back({c.name, c.reason});
  return out;
}

const Kernels& kernels() {
  if (const Kernels* table = forced.load(std::memory_order_acquire)) return *table;
  static const Kernels& best = [&]() -> const Kernels& {
    const Candidate* pick = nullptr;
    for (const Candidate& c : candidates()) {
      if (c.reason.empty()) pick = &c;
    }
    return pick->table();
  }();
  return best;
}

void force_isa(const std::string& name) {
  if (name.empty()) {
    forced.store(nullptr, std::memory_order_release);
    return;
  }
  std::string usable;
  for (const Candidate& c : candidates()) {
    if (c.name == name) {
      if (!c.reason.empty())
        throw Refusal("This machine cannot run the " + name + " kernels: " + c.reason + ".",
                      "Leave the choice to coattn, or force 'generic'.");
      forced.store(&c.table(), std::memory_order_release);
      return;
    }
    if (c.reason.empty()) usable += (usable.empty() ? "" : ", ") + std::string(c.name);
  }
  throw Refusal("There are no '" + name + "' kernels.", "This machine runs: " + usable + ".");
}

}  // namespace coattn
