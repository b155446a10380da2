#include <nanobind/stl/string.h>

#include "bind.h"
#include "cpu_features.h"

namespace nb = nanobind;

namespace coattn {

void bind_features(nb::module_& m) {
  m.def("cpu_features", [] {
    const CpuFeatures& f = cpu_features();
    nb::dict d;
    d["name"] = f.name;
    d["avx2"] = f.avx2;
    d["avx512"] = f.avx512;
    d["avx512_bf16"] = f.avx512_bf16;
    d["avx512_vnni"] = f.avx512_vnni;
    d["amx"] = f.amx_bf16;
    d["amx_reason"] = f.amx_reason;
    d["neon"] = f.neon;
    d["dotprod"] = f.dotprod;
    return d;
  });
}

}  // namespace coattn
