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
  m.def(
      "gather_gbps",
      [](int threads, uintptr_t base, int64_t block_stride, int64_t head_stride, int64_t num_blocks,
         int64_t bytes, int heads, uintptr_t table, int64_t lists, int64_t blocks, int repeats) {
        const GatherPieces pieces{
            reinterpret_cast<const uint8_t*>(base),  block_stride, head_stride, num_blocks, bytes, heads,
            reinterpret_cast<const int32_t*>(table), lists,        blocks};
        return gather_gbps(threads, pieces, repeats);
      },
      Release());
  m.def("job_latency", &job_latency, nb::arg("threads"), nb::arg("n"), nb::arg("us"), Release());
  m.def("spin_gaps", &spin_gaps, nb::arg("threads"), nb::arg("seconds"), nb::arg("least_us"), Release());
}

}  // namespace coattn
