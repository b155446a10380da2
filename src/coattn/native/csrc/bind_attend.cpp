#include <nanobind/stl/string.h>

#include "bind.h"
#include "bind_job.h"
#include "kernels/attend.h"

namespace nb = nanobind;

namespace coattn {

void bind_attend(nb::module_& m) {
  nb::class_<AttendJob> c(m, "AttendJob");
  // Value-initialised: every field that Python leaves out is zero.
  c.def("__init__", [](AttendJob* self) { new (self) AttendJob{}; });
  field(c, "seqs", &AttendJob::seqs);
  field(c, "q_tokens", &AttendJob::q_tokens);
  field(c, "q_heads", &AttendJob::q_heads);
  field(c, "kv_heads", &AttendJob::kv_heads);
  field(c, "head_size", &AttendJob::head_size);
  field(c, "q", &AttendJob::q);
  field(c, "q_elem", &AttendJob::q_elem);
  field(c, "q_seq", &AttendJob::q_seq);
  field(c, "q_token", &AttendJob::q_token);
  field(c, "q_head", &AttendJob::q_head);
  field(c, "scale", &AttendJob::scale);
  field(c, "softcap", &AttendJob::softcap);
  field(c, "elem", &AttendJob::elem);
  field(c, "table", &AttendJob::table);
  field(c, "tokens", &AttendJob::tokens);
  field(c, "table_heads", &AttendJob::table_heads);
  field(c, "max_blocks", &AttendJob::max_blocks);
  field(c, "owners", &AttendJob::owners);
  field(c, "base", &AttendJob::base);
  field(c, "block_stride", &AttendJob::block_stride);
  field(c, "head_stride", &AttendJob::head_stride);
  field(c, "num_blocks", &AttendJob::num_blocks);
  field(c, "block", &AttendJob::block);
  field(c, "out", &AttendJob::out);
  field(c, "lse", &AttendJob::lse);
  field(c, "weights", &AttendJob::weights);
  field(c, "max_tokens", &AttendJob::max_tokens);
  field(c, "piece", &AttendJob::piece);
  runnable<AttendJob>(m, "attend", "submit_attend", &attend);
  m.def("attend_kernel_name", [](int elem, int q_elem, int group, int head_size) {
    return std::string(
        attend_kernel_name(static_cast<Elem>(elem), static_cast<Elem>(q_elem), group, head_size));
  });
}

}  // namespace coattn
