"""What `coattn eval perplexity` and `fidelity` share: a method and full attention over windows of a text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coattn.cli.evaluate import Subject, prepare
from coattn.cli.options import parse_settings
from coattn.cli.output import keep, out, print_json, progress, save, writable

if TYPE_CHECKING:
    from coattn.tools.evaluate.paired import Pair
    from coattn.tools.evaluate.watch import Fidelity

Part = Callable[["Pair", "Fidelity", int], dict[str, Any]]
"""`(pair, probe, number of the pair in this run)` -> one window in numbers"""
Summarise = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
"""Windows in numbers -> the figures of the whole."""
PEAKS = ("gpu_kv_peak", "host_kv_peak")


def compare_windows(
    options: dict[str, Any], kind: str, part: Part, summarise: Summarise, watched: bool = False, **how: Any
) -> tuple[dict[str, Any], Subject]:
    """Runs the windows, writes to --out, and returns the whole result. how: see `Comparison.pairs`."""
    from coattn.method.row import compose
    from coattn.method.table import find_method

    composed = compose(find_method(options["method"]), **parse_settings(options["settings"]))
    target, subject = writable(options["target"]), prepare(options)

    from coattn.provenance import provenance
    from coattn.tools.evaluate.paired import Comparison
    from coattn.tools.evaluate.watch import Fidelity

    budgets = {name: options[name] for name in ("gpu_kv", "host_kv")}
    comparison = Comparison(subject.loaded.model, composed, **budgets)
    windows, probe, started = subject.windows, Fidelity(), time.perf_counter()
    rows: list[dict[str, Any]] = []
    peaks = dict.fromkeys(PEAKS, 0)
    total = comparison.runs(how.get("reuse", False)) * len(windows.starts) * windows.length
    with progress(composed.method.name, total) as bar:

        def report(name: str, tokens: int) -> None:
            bar.update(bar.task_ids[0], description=name, completed=tokens)

        probes, how = [probe] if watched else [], {"batch": options["batch"], **how}
        for number, pair in enumerate(comparison.pairs(subject.ids, windows, probes=probes, report=report, **how)):
            peaks = {name: max(peak, pair.own.report[name]) for name, peak in peaks.items()}
            rows.append(part(pair, probe, number))
            keep(target, windows=rows)
    described = {"method": composed.method.name, "exact": composed.exact, "params": dict(composed.params)}
    config = {"evaluation": kind, **subject.config(), **described, "row": dict(composed.method.parts()), **budgets}
    seconds = round(time.perf_counter() - started, 1)
    result = {**summarise(rows), "windows": rows, **config, **peaks, "seconds": seconds, **provenance()}
    save(target, result)
    return result, subject


def show(result: dict[str, Any], text: str, subject: Subject, as_json: bool) -> None:
    """The result on stdout, as --json says."""
    if as_json:
        print_json(result)
    else:
        kind = "exact" if result["exact"] else "lossy"
        out.print(f"{result['method']} ({kind}): {text}\n{subject.where()}", highlight=False)
