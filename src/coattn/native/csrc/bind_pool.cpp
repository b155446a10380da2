#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "bind_ticket.h"
#include "dispatch.h"
#include "topology.h"

namespace nb = nanobind;

namespace coattn {

void bind_pool(nb::module_& m) {
  m.def("set_threads", &set_threads, nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
  m.def("abandon_pool", &abandon_pool, nb::call_guard<nb::gil_scoped_release>());
  m.def("default_threads", &default_threads);
  m.def("threads", [] { return runtime()->pool.size(); }, nb::call_guard<nb::gil_scoped_release>());
  m.def("worker_cpus", [] { return runtime()->pool.cpus(); }, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "set_spin_us", [](int64_t us) { runtime()->pool.set_spin_us(us); }, nb::arg("us"),
      nb::call_guard<nb::gil_scoped_release>());
  // For tests: a job whose given worker throws.
  m.def(
      "fail_on_worker",
      [](int failing) {
        runtime()->pool.run(Join::all, [&](int worker, int) {
          if (worker == failing) throw std::runtime_error("worker " + std::to_string(worker) + " failed");
        });
      },
      nb::arg("worker"), nb::call_guard<nb::gil_scoped_release>());

  m.def("force_isa", &force_isa, nb::arg("name"));
  m.def("isa", [] { return std::string(kernels().isa); });
  m.def("isas", [] {
    nb::list out;
    for (const IsaStatus& s : isas()) out.append(nb::make_tuple(s.name, s.reason));
    return out;
  });

  nb::class_<Ticket>(m, "Ticket")
      .def("wait", &Ticket::wait, nb::arg("timeout_us") = 0, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace coattn
