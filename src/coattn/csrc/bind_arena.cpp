#include <nanobind/stl/string.h>

#include "arena.h"
#include "bind.h"
#include "runtime.h"

namespace nb = nanobind;

namespace coattn {

void bind_arena(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.def("cuda_unavailable", &CudaHost::unavailable, nb::arg("device"), Release());
  nb::class_<Arena>(m, "Arena")
      .def(nb::init<int64_t, int64_t, int>(), nb::arg("block_bytes"), nb::arg("budget_bytes"),
           nb::arg("cuda_device"))
      .def_prop_ro("base", [](const Arena& a) { return reinterpret_cast<uintptr_t>(a.base()); })
      .def_prop_ro("block_bytes", &Arena::block_bytes)
      .def("committed_blocks", &Arena::committed_blocks, Release())
      .def(
          "grow", [](Arena& a, int64_t bytes) { a.grow(bytes, runtime()->pool); }, nb::arg("bytes"),
          Release())
      .def("stats", [](Arena& a) {
        const ArenaStats s = a.stats();
        nb::dict d;
        d["block_bytes"] = s.block_bytes;
        d["budget_bytes"] = s.budget_bytes;
        d["committed_bytes"] = s.committed_bytes;
        d["registered_bytes"] = s.registered_bytes;
        d["huge_bytes"] = s.huge_bytes;
        d["capacity_blocks"] = s.capacity_blocks;
        d["touch_seconds"] = s.touch_seconds;
        d["register_seconds"] = s.register_seconds;
        return d;
      });
}

}  // namespace coattn
