#include "bind.h"
#include "bind_job.h"
#include "kernels/block_rows.h"
#include "kernels/compact.h"
#include "kernels/keep_rows.h"
#include "kernels/move_rows.h"
#include "kernels/put_rows.h"
#include "kernels/score_digest.h"
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
  field(c, "values_only", &EntrySource::values_only);
  field(c, "k", &EntrySource::k);
  field(c, "v", &EntrySource::v);
  field(c, "k_seq", &EntrySource::k_seq);
  field(c, "k_head", &EntrySource::k_head);
  field(c, "k_row", &EntrySource::k_row);
  field(c, "v_seq", &EntrySource::v_seq);
  field(c, "v_head", &EntrySource::v_head);
  field(c, "v_row", &EntrySource::v_row);
  field(c, "rows", &EntrySource::rows);
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

void bind_compact(nb::module_& m) {
  nb::class_<CompactJob> c(m, "CompactJob");
  c.def("__init__", [](CompactJob* self) { new (self) CompactJob{}; });
  field(c, "source", &CompactJob::source);
  field(c, "seqs", &CompactJob::seqs);
  field(c, "index", &CompactJob::index);
  field(c, "count", &CompactJob::count);
  field(c, "max_entries", &CompactJob::max_entries);
  field(c, "out_elem", &CompactJob::out_elem);
  field(c, "k_out", &CompactJob::k_out);
  field(c, "v_out", &CompactJob::v_out);
  field(c, "k_seq", &CompactJob::k_seq);
  field(c, "k_head", &CompactJob::k_head);
  field(c, "k_row", &CompactJob::k_row);
  field(c, "v_seq", &CompactJob::v_seq);
  field(c, "v_head", &CompactJob::v_head);
  field(c, "v_row", &CompactJob::v_row);
  runnable<CompactJob>(m, "compact", "submit_compact", &compact);
}

void bind_move_rows(nb::module_& m) {
  nb::class_<MoveRowsJob> c(m, "MoveRowsJob");
  c.def("__init__", [](MoveRowsJob* self) { new (self) MoveRowsJob{}; });
  field(c, "from_rows", &MoveRowsJob::from);
  field(c, "to_rows", &MoveRowsJob::to);
  field(c, "count", &MoveRowsJob::count);
  field(c, "row_bytes", &MoveRowsJob::row_bytes);
  field(c, "from_value", &MoveRowsJob::from_value);
  field(c, "to_value", &MoveRowsJob::to_value);
  runnable<MoveRowsJob>(m, "move_rows", "submit_move_rows", &move_rows);
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
  runnable<PutRowsJob>(m, "put_rows", "submit_put_rows", &put_rows);
}

void bind_score_digest(nb::module_& m) {
  nb::class_<ScoreDigestJob> c(m, "ScoreDigestJob");
  c.def("__init__", [](ScoreDigestJob* self) { new (self) ScoreDigestJob{}; });
  field(c, "seqs", &ScoreDigestJob::seqs);
  field(c, "q_heads", &ScoreDigestJob::q_heads);
  field(c, "kv_heads", &ScoreDigestJob::kv_heads);
  field(c, "head_size", &ScoreDigestJob::head_size);
  field(c, "q", &ScoreDigestJob::q);
  field(c, "q_elem", &ScoreDigestJob::q_elem);
  field(c, "q_seq", &ScoreDigestJob::q_seq);
  field(c, "q_head", &ScoreDigestJob::q_head);
  field(c, "elem", &ScoreDigestJob::elem);
  field(c, "two_sided", &ScoreDigestJob::two_sided);
  field(c, "base", &ScoreDigestJob::base);
  field(c, "block_stride", &ScoreDigestJob::block_stride);
  field(c, "head_stride", &ScoreDigestJob::head_stride);
  field(c, "num_blocks", &ScoreDigestJob::num_blocks);
  field(c, "table", &ScoreDigestJob::table);
  field(c, "count", &ScoreDigestJob::count);
  field(c, "table_heads", &ScoreDigestJob::table_heads);
  field(c, "max_blocks", &ScoreDigestJob::max_blocks);
  field(c, "scale", &ScoreDigestJob::scale);
  field(c, "out", &ScoreDigestJob::out);
  runnable<ScoreDigestJob>(m, "score_digest", "submit_score_digest", &score_digest);
}

void bind_block_rows(nb::module_& m) {
  nb::class_<BlockRowsJob> c(m, "BlockRowsJob");
  c.def("__init__", [](BlockRowsJob* self) { new (self) BlockRowsJob{}; });
  field(c, "k", &BlockRowsJob::k);
  field(c, "v", &BlockRowsJob::v);
  field(c, "row_elem", &BlockRowsJob::row_elem);
  field(c, "k_token", &BlockRowsJob::k_token);
  field(c, "k_head", &BlockRowsJob::k_head);
  field(c, "v_token", &BlockRowsJob::v_token);
  field(c, "v_head", &BlockRowsJob::v_head);
  field(c, "tokens", &BlockRowsJob::tokens);
  field(c, "kv_heads", &BlockRowsJob::kv_heads);
  field(c, "head_size", &BlockRowsJob::head_size);
  field(c, "elem", &BlockRowsJob::elem);
  field(c, "base", &BlockRowsJob::base);
  field(c, "block_stride", &BlockRowsJob::block_stride);
  field(c, "head_stride", &BlockRowsJob::head_stride);
  field(c, "num_blocks", &BlockRowsJob::num_blocks);
  field(c, "block", &BlockRowsJob::block);
  field(c, "slots", &BlockRowsJob::slots);
  field(c, "blocks", &BlockRowsJob::blocks);
  field(c, "block_count", &BlockRowsJob::block_count);
  runnable<BlockRowsJob>(m, "write_rows", "submit_write_rows", &write_rows);
  runnable<BlockRowsJob>(m, "write_blocks", "submit_write_blocks", &write_blocks);
  runnable<BlockRowsJob>(m, "read_blocks", "submit_read_blocks", &read_blocks);
}

}  // namespace

void bind_entries(nb::module_& m) {
  bind_source(m);
  bind_weighted_sum(m);
  bind_compact(m);
  bind_score_digest(m);
  bind_move_rows(m);
  bind_keep_rows(m);
  bind_put_rows(m);
  bind_block_rows(m);
}

}  // namespace coattn
