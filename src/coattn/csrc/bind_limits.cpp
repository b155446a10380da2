#include <nanobind/stl/vector.h>

#include "bind.h"
#include "machine_limits.h"

namespace nb = nanobind;

namespace coattn {

void bind_limits(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.def("stream_read_gbps", &stream_read_gbps, nb::arg("threads"), nb::arg("bytes"), nb::arg("repeats"),
        Release());
  m.def("random_gather_gbps", &random_gather_gbps, nb::arg("threads"), nb::arg("block_bytes"),
        nb::arg("bytes"), nb::arg("repeats"), Release());
  m.def("empty_job_latency", &empty_job_latency, nb::arg("threads"), nb::arg("n"), Release());
  m.def("busy_job_latency", &busy_job_latency, nb::arg("threads"), nb::arg("n"), nb::arg("us"), Release());
}

}  // namespace coattn
