"""`coattn-lab`: every command of the laboratory."""

from __future__ import annotations

from coattn.cli.main import run_group
from coattn_lab.cli import (
    bench_decode,
    bench_hgca,
    bench_ops,
    bench_prefill,
    bench_requests,
    bench_scout,
    eval_attention,
    eval_audit,
    eval_sweep,
    eval_table,
    eval_tasks,
)
from coattn_lab.cli.groups import lab

__all__ = [
    "bench_decode",
    "bench_hgca",
    "bench_ops",
    "bench_prefill",
    "bench_requests",
    "bench_scout",
    "eval_attention",
    "eval_audit",
    "eval_sweep",
    "eval_table",
    "eval_tasks",
    "main",
]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; errors end as they do in `coattn`."""
    run_group(lab, "coattn-lab", arguments)
