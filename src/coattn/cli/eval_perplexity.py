"""`coattn eval perplexity`."""

from __future__ import annotations

from typing import Any

from coattn.cli.eval_windows import compare_windows, show
from coattn.cli.evaluate import evaluate, shared_options


@evaluate.command()
@shared_options
def perplexity(**options: Any) -> None:
    """Measure the perplexity of a text, over all of it and over the decode steps alone.

    The first tokens of each window (--prefill) are prefilled exactly. The method reads the next ones (--decode) one
    decode step at a time. The confidence interval of the ratio comes from paired differences of the tokens' losses.
    """
    from coattn.tools.evaluate.perplexity import summarise, window

    def part(pair: Any, _probe: Any, _number: int) -> dict[str, Any]:
        return window(pair.start, pair.own, pair.full)

    result, subject = compare_windows(options, "perplexity", part, summarise, reuse=True)
    show(result, describe(result), subject, options["as_json"])


def describe(result: dict[str, Any]) -> str:
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
