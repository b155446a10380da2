#include "arena.h"
#include "bind.h"
#include "runtime.h"

namespace nb = nanobind;

namespace coattn {

void bind_arena(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Arena>(m, "Arena")
      .def(nb::init<int64_t, bool>(), nb::arg("budget_bytes"), nb::arg("pinned"))
      .def_prop_ro("base", [](const Arena& a) { return reinterpret_cast<uintptr_t>(a.base()); })
      .def("committed", &Arena::committed, Release())
      .def(
          "grow",
          [](Arena& a, int64_t bytes, bool alone, bool touched) {
            if (alone) return a.grow(bytes, lone_pool(), touched);
            a.grow(bytes, runtime()->pool, touched);
          },
          nb::arg("bytes"), nb::arg("alone"), nb::arg("touched"), Release())
      .def("huge_bytes", &Arena::huge_bytes, Release());
}

}  // namespace coattn
