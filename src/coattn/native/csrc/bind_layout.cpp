#include "bind.h"
#include "block_layout.h"

namespace nb = nanobind;

namespace coattn {

void bind_layout(nb::module_& m) {
  nb::dict elems;
  for (int e = 0; e < kElems; ++e) elems[elem_name(static_cast<Elem>(e))] = e;
  m.attr("elems") = elems;
  m.def(
      "block_layout",
      [](int elem, int block, int head_size, bool keys) {
        const BlockLayout b = block_layout(static_cast<Elem>(elem), block, head_size, keys);
        nb::dict d;
        d["row_bytes"] = b.row_bytes;
        d["k_stride"] = b.k_stride;
        d["v_stride"] = b.v_stride;
        d["k"] = b.k;
        d["v"] = b.v;
        d["k_scale"] = b.k_scale;
        d["k_min"] = b.k_min;
        d["v_scale"] = b.v_scale;
        d["v_min"] = b.v_min;
        d["v_groups"] = b.v_groups;
        d["bytes"] = b.bytes;
        return d;
      },
      nb::arg("elem"), nb::arg("block"), nb::arg("head_size"), nb::arg("keys") = true);
}

}  // namespace coattn
