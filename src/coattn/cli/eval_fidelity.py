"""`coattn eval fidelity`."""

from __future__ import annotations

from typing import Any

import click

from coattn.cli.eval_windows import compare_windows, show
from coattn.cli.evaluate import evaluate, shared_options
from coattn.errors import InputError

QUICK = {"prefill": 2048, "decode": 32, "stride": 8192, "length": 16384}
"""Two windows: a few minutes for the embedded model on two cores."""


@evaluate.command()
@shared_options
@click.option(
    "--quick", is_flag=True, help="Use two windows of 2,048 tokens and 32 steps, unless other options are given."
)
def fidelity(**options: Any) -> None:
    """Compare predictions and attention with those of full attention, step by step.

    Predictions: KL divergence, top-1 and top-5 agreement. Attention, per layer: cosine of the output, attended share of
    the softmax's mass and of the entries, and the CPU's part of it. The first tokens of each window (--prefill) are
    prefilled exactly; the next (--decode) are decode steps under the method.
    """
    if options["quick"]:
        options = quick(options)

    from coattn.tools.evaluate.fidelity import summarise, window

    def part(pair: Any, probe: Any, number: int) -> dict[str, Any]:
        return window(pair.start, pair.own, pair.full, probe.measures()[number])

    result, subject = compare_windows(options, "fidelity", part, summarise, watched=True, score_prefill=False)
    show(result, describe(result), subject, options["as_json"])


def quick(options: dict[str, Any]) -> dict[str, Any]:
    """The options with those of --quick where none was given."""
    if options["length"] is not None and options["prefill"] is None:
        raise InputError("--quick and --length both set the length of a window.", "Give one of them.")
    return {**options, **{name: value for name, value in QUICK.items() if options[name] is None}}


def describe(result: dict[str, Any]) -> str:
    """Two lines for people."""
    return (
        f"KL {result['kl']:.3g} (worst step {result['kl_max']:.3g}), top-1 agreement {result['top1']:.2%}, "
        f"top-5 {result['top5']:.2%} with full attention over {result['steps']} decode steps\n"
        f"attention: cosine {result['cosine']:.4f}, mass recalled {result['mass']:.2%}, entries attended "
        f"{result['share_attended']:.2%}, of them by the CPU {result['cpu_ratio']:.2%}"
    )
