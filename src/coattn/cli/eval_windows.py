"""`coattn eval perplexity` and `fidelity`: a method and full attention over windows of a text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from coattn.cli.evaluate import evaluate, prepare, shared_options
from coattn.cli.options import compose_method
from coattn.cli.output import keep, print_json, print_line, progress, save, writable
from coattn.errors import InputError
from coattn.units import format_bytes

if TYPE_CHECKING:
    from coattn.tools.evaluate.watch import Fidelity

QUICK = {"prefill": 2048, "decode": 32, "stride": 8192, "length": 16384}
"""Two windows: a few minutes for the embedded model on two cores."""

ALL = 1 - 1e-6
"""Of the entries, a share that is all of them but for rounding."""


@evaluate.command()
@shared_options
def perplexity(**options: Any) -> None:
    """Measure the perplexity of a text, over all of it and over the decode steps alone.

    The first tokens of each window (--prefill) are prefilled exactly. The method reads the next ones (--decode) one
    decode step at a time. The confidence interval of the ratio comes from paired differences of the tokens' losses.
    """
    from coattn.tools.evaluate import perplexity as measure

    compare_windows(options, "perplexity", measure, describe_perplexity)


@evaluate.command()
@shared_options
@click.option(
    "--quick", is_flag=True, help="Use two windows of 2,048 tokens and 32 steps, unless other options are given."
)
def fidelity(quick: bool, **options: Any) -> None:
    """Compare predictions and attention with those of full attention, step by step.

    Predictions: KL divergence, top-1 and top-5 agreement. Attention, per layer: cosine of the output, attended share of
    the softmax's mass and of the entries, and the CPU's part of it. The first tokens of each window (--prefill) are
    prefilled exactly; the next (--decode) are decode steps under the method.
    """
    if quick and options["length"] is not None and options["prefill"] is None:
        raise InputError("--quick and --length both set the length of a window.", "Give one of them.")
    if quick:
        options |= {name: value for name, value in QUICK.items() if options[name] is None}

    from coattn.tools.evaluate import fidelity as measure
    from coattn.tools.evaluate.watch import Fidelity

    compare_windows(options, "fidelity", measure, describe_fidelity, Fidelity())


def compare_windows(
    options: dict[str, Any],
    kind: str,
    measure: Any,
    describe: Callable[[dict[str, Any]], str],
    probe: Fidelity | None = None,
) -> None:
    """Runs the windows and gives the result out. measure: the module that makes numbers of windows and sums them up."""
    composed = compose_method(options)
    target, subject = writable(options["target"]), prepare(options)

    from coattn.hf.sketches import with_sketches
    from coattn.provenance import provenance
    from coattn.tools.evaluate.paired import Comparison

    budgets = {name: options[name] for name in ("gpu_kv", "host_kv")}
    composed = with_sketches(composed, subject.loaded)
    comparison = Comparison(subject.loaded.model, composed, **budgets, probe=probe)
    windows, started = subject.windows, time.perf_counter()
    rows: list[dict[str, Any]] = []
    peaks = {"gpu_kv_peak": 0, "host_kv_peak": 0}
    with progress(composed.method.name, comparison.runs * len(windows.starts) * windows.length) as bar:

        def report(name: str, tokens: int) -> None:
            bar.update(bar.task_ids[0], description=name, completed=tokens)

        for number, pair in enumerate(comparison.pairs(subject.ids, windows, options["batch"], report)):
            peaks = {name: max(peak, pair.own.report[name]) for name, peak in peaks.items()}
            rows.append(measure.window(*pair, *([] if probe is None else [probe.measures()[number]])))
            keep(target, windows=rows)
    result = {
        **measure.summarise(rows),
        "windows": rows,
        "evaluation": kind,
        **subject.config(),
        **composed.describe(),
        "row": dict(composed.method.parts()),
        **budgets,
        **peaks,
        "seconds": round(time.perf_counter() - started, 1),
        **provenance(),
    }
    save(target, result)
    if options["as_json"]:
        print_json(result)
    else:
        kind = "exact" if result["exact"] else "lossy"
        print_line(f"{result['method']} ({kind}): {describe(result)}\n{subject.where()}")


def describe_perplexity(result: dict[str, Any]) -> str:
    """One line for people."""
    line = (
        f"perplexity {result['perplexity']:.4f}, full attention {result['perplexity_full']:.4f}, "
        f"ratio {result['ratio']:.4f} over {result['tokens']:,} tokens"
    )
    if "decode" in result:
        decode, interval = result["decode"], result["decode"]["ratio_95"]
        line += f"; over the {decode['tokens']:,} after decode steps alone {decode['perplexity']:.4f}"
        line += f", ratio {decode['ratio']:.4f}"
        line += f" (95%: {interval[0]:.4f} to {interval[1]:.4f})" if interval else ""
    return line


def describe_fidelity(result: dict[str, Any]) -> str:
    """Three lines for people, a fourth where nothing was left out."""
    low_high = "" if result["kl_95"] is None else "95%: {:.3g} to {:.3g}, ".format(*result["kl_95"])
    said = (
        f"KL {result['kl']:.3g} ({low_high}worst step {result['kl_max']:.3g}), top-1 agreement {result['top1']:.2%}, "
        f"top-5 {result['top5']:.2%} with full attention over {result['steps']} decode steps\n"
        f"attention: cosine {result['cosine']:.4f}, mass recalled {result['mass']:.2%}, entries attended "
        f"{result['share_attended']:.2%}, of them by the CPU {result['cpu_ratio']:.2%}\n"
        f"KV at most {format_bytes(result['gpu_kv_peak'])} in GPU memory, "
        f"{format_bytes(result['host_kv_peak'])} in DRAM"
    )
    if not result["exact"] and result["row"]["select"] != "everything" and result["share_attended"] >= ALL:
        said += "\nThe budget covers the whole text: this is dense attention. Take a longer text or a smaller budget."
    return said
