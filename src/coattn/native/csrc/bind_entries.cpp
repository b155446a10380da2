#include "bind.h"
#include "bind_job.h"
#include "kernels/fill_rows.h"
#include "kernels/keep_rows.h"
#include "kernels/put_rows.h"
#include "kernels/weighted_sum.h"

namespace nb = nanobind;

namespace coattn {
namespace {

void bind_source(nb::module_& m) {
  nb::class_<EntrySource> c(m, "EntrySource");
  c.def("__init__", [](EntrySource* self) { new (self) EntrySource{}; });
  field(c, "elem", &EntrySource::elem);
  field(c, "kv_heads", &EntrySource::kv_heads);
  field(c, "head_size", &EntrySource::head_size);
  field(c, "table", &EntrySource::table);
  field(c, "table_heads", &EntrySource::table_heads);
  field(c, "max_blocks", &EntrySource::max_blocks);
  field(c, "base", &EntrySource::base);
  field(c, "block_stride", &EntrySource::block_stride);
  field(c, "head_stride", &EntrySource::head_stride);
  field(c, "num_blocks", &EntrySource::num_blocks);
  field(c, "block", &EntrySource::block);
}

void bind_weighted_sum(nb::module_& m) {
  nb::class_<WeightedSumJob> c(m, "WeightedSumJob");
  c.def("__init__", [](WeightedSumJob* self) { new (self) WeightedSumJob{}; });
  field(c, "source", &WeightedSumJob::source);
  field(c, "seqs", &WeightedSumJob::seqs);
  field(c, "q_heads", &WeightedSumJob::q_heads);
  field(c, "index", &WeightedSumJob::index);
  field(c, "count", &WeightedSumJob::count);
  field(c, "max_entries", &WeightedSumJob::max_entries);
  field(c, "weights", &WeightedSumJob::weights);
  field(c, "out", &WeightedSumJob::out);
  runnable<WeightedSumJob>(m, "weighted_sum", "submit_weighted_sum", &weighted_sum);
}

void bind_keep_rows(nb::module_& m) {
  nb::class_<KeepRowsJob> c(m, "KeepRowsJob");
  c.def("__init__", [](KeepRowsJob* self) { new (self) KeepRowsJob{}; });
  field(c, "count", &KeepRowsJob::count);
  field(c, "block", &KeepRowsJob::block);
  field(c, "row_bytes", &KeepRowsJob::row_bytes);
  field(c, "kept", &KeepRowsJob::kept);
  field(c, "weight", &KeepRowsJob::weight);
  field(c, "source", &KeepRowsJob::source);
  field(c, "first", &KeepRowsJob::first);
  field(c, "list", &KeepRowsJob::list);
  field(c, "spare", &KeepRowsJob::spare);
  field(c, "used", &KeepRowsJob::used);
  field(c, "table", &KeepRowsJob::table);
  field(c, "width", &KeepRowsJob::width);
  field(c, "stored", &KeepRowsJob::stored);
  field(c, "base", &KeepRowsJob::base);
  field(c, "position", &KeepRowsJob::position);
  field(c, "weights", &KeepRowsJob::weights);
  field(c, "head_size", &KeepRowsJob::head_size);
  field(c, "other", &KeepRowsJob::other);
  field(c, "moved", &KeepRowsJob::moved);
  runnable<KeepRowsJob>(m, "keep_rows", "submit_keep_rows", &keep_rows);
}

void bind_put_rows(nb::module_& m) {
  nb::class_<PutRowsJob> c(m, "PutRowsJob");
  c.def("__init__", [](PutRowsJob* self) { new (self) PutRowsJob{}; });
  field(c, "count", &PutRowsJob::count);
  field(c, "list", &PutRowsJob::list);
  field(c, "first", &PutRowsJob::first);
  field(c, "source", &PutRowsJob::source);
  field(c, "row", &PutRowsJob::row);
  field(c, "table", &PutRowsJob::table);
  field(c, "width", &PutRowsJob::width);
  field(c, "stored", &PutRowsJob::stored);
  field(c, "base", &PutRowsJob::base);
  field(c, "block", &PutRowsJob::block);
  field(c, "head_size", &PutRowsJob::head_size);
  field(c, "row_bytes", &PutRowsJob::row_bytes);
  runnable<PutRowsJob>(m, "put_rows", "submit_put_rows", &put_rows);
}

void bind_fill_rows(nb::module_& m) {
  nb::class_<FillRowsJob> c(m, "FillRowsJob");
  c.def("__init__", [](FillRowsJob* self) { new (self) FillRowsJob{}; });
  field(c, "count", &FillRowsJob::count);
  field(c, "position", &FillRowsJob::position);
  field(c, "weight", &FillRowsJob::weight);
  field(c, "id", &FillRowsJob::id);
  field(c, "source", &FillRowsJob::source);
  field(c, "block_stride", &FillRowsJob::block_stride);
  field(c, "list", &FillRowsJob::list);
  field(c, "fresh", &FillRowsJob::fresh);
  field(c, "table", &FillRowsJob::table);
  field(c, "width", &FillRowsJob::width);
  field(c, "stored", &FillRowsJob::stored);
  field(c, "base", &FillRowsJob::base);
  field(c, "block", &FillRowsJob::block);
  field(c, "head_size", &FillRowsJob::head_size);
  field(c, "row_bytes", &FillRowsJob::row_bytes);
  field(c, "positions", &FillRowsJob::positions);
  field(c, "weights", &FillRowsJob::weights);
  field(c, "piece", &FillRowsJob::piece);
  field(c, "rest", &FillRowsJob::rest);
  field(c, "stop", &FillRowsJob::stop);
  m.def(
      "fill_rows",
      [](const FillRowsJob& job, bool alone) {
        return alone ? fill_rows(job, lone_pool()) : fill_rows(job, runtime()->pool);
      },
      nb::arg("job"), nb::arg("alone"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_entries(nb::module_& m) {
  bind_source(m);
  bind_weighted_sum(m);
  bind_keep_rows(m);
  bind_put_rows(m);
  bind_fill_rows(m);
}

}  // namespace coattn
