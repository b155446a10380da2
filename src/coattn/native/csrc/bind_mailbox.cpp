#include <nanobind/stl/string.h>

#include "bind.h"
#include "fault.h"
#include "mailbox.h"

namespace nb = nanobind;

namespace coattn {

void bind_mailbox(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Mailbox>(m, "Mailbox")
      .def(nb::init<int64_t>(), nb::arg("deadline_us"))
      .def("add",
           [](Mailbox& self, const AttendJob& job, uintptr_t post, uintptr_t reply, int rank) {
             self.add(job, reinterpret_cast<uint32_t*>(post), reinterpret_cast<uint32_t*>(reply), rank);
           })
      .def("add",
           [](Mailbox& self, const WeightedSumJob& job, uintptr_t post, uintptr_t reply, int rank) {
             self.add(job, reinterpret_cast<uint32_t*>(post), reinterpret_cast<uint32_t*>(reply), rank);
           })
      .def("begin", &Mailbox::begin, Release())
      .def("finish", &Mailbox::finish, Release())
      .def("call_off", &Mailbox::call_off)
      .def("stop", &Mailbox::stop, Release())
      .def("times", [](const Mailbox& self) {
        nb::list out;
        for (const JobTimes& t : self.times()) out.append(nb::make_tuple(t.posted_ns, t.done_ns));
        return out;
      });
  m.def("inject_fault", &inject_fault, nb::arg("kind"), nb::arg("seconds") = 0.0);
}

}  // namespace coattn
