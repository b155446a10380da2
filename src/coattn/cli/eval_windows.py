"""What `coattn eval perplexity` and `fidelity` share: a method and full attention over windows of a text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coattn.cli.evaluate import Subject, prepare
from coattn.cli.options import parse_settings
from coattn.cli.output import err, out, print_json, progress, writable

if TYPE_CHECKING:
    from coattn.evaluate.paired import Comparison, Pair
    from coattn.evaluate.results import Results
    from coattn.evaluate.watch import Fidelity

Part = Callable[["Pair", "Fidelity", int], dict[str, Any]]
"""`(pair, probe, number of the pair in this run)` -> one window in numbers"""
PEAKS = ("gpu_kv_peak", "host_kv_peak")


def compare_windows(options: dict[str, Any], kind: str, part: Part, **how: Any) -> tuple[dict[str, Any], Subject]:
    """Runs the windows that --out does not hold yet, writes there, and returns the whole result.

    kind: `fidelity` or `perplexity`. how: see `Comparison.pairs`.
    """
    from coattn.method import compose
    from coattn.methods import find_method

    composed = compose(find_method(options["method"]), **parse_settings(options["settings"]))
    target, subject = writable(options["target"]), prepare(options)

    from coattn.evaluate import fidelity, figures, perplexity
    from coattn.evaluate.paired import Comparison
    from coattn.evaluate.results import Results, describe

    budgets = {name: options[name] for name in ("gpu_kv", "host_kv")}
    config = {"evaluation": kind, **subject.config(), **describe(composed), **budgets}
    summarise = {"fidelity": fidelity.summarise, "perplexity": perplexity.summarise}[kind]
    results = Results(target, config, summarise, items="windows", key="start")
    run(Comparison(subject.loaded.model, composed, **budgets), subject, results, part, batch=options["batch"], **how)
    result = results.finish(subject.windows.starts)  # type: ignore[arg-type]
    if target is not None:
        figure = target.with_suffix(".png")
        {"fidelity": figures.fidelity, "perplexity": figures.perplexity}[kind](result, figure)
        err.print(f"wrote {target} and {figure}", soft_wrap=True)
    return result, subject


def run(
    comparison: Comparison, subject: Subject, results: Results, part: Part, *, watched: bool = False, **how: Any
) -> None:
    """Adds the windows that are missing, with a bar that shows the time left."""
    from coattn.evaluate.watch import Fidelity

    done = {int(start) for start in results.done}
    todo = replace(subject.windows, starts=tuple(start for start in subject.windows.starts if start not in done))
    if not todo.starts:
        return
    probe, started = Fidelity(), time.perf_counter()
    total = comparison.runs(how.get("reuse", False)) * len(todo.starts) * todo.length
    with progress(comparison.composed.method.name, total) as bar:

        def report(name: str, tokens: int) -> None:
            bar.update(bar.task_ids[0], description=name, completed=tokens)

        probes = [probe] if watched else []
        for number, pair in enumerate(comparison.pairs(subject.ids, todo, probes=probes, report=report, **how)):
            results.note({name: pair.own.report[name] for name in PEAKS}, 0)
            results.add(part(pair, probe, number))
    results.note({}, time.perf_counter() - started)


def show(result: dict[str, Any], text: str, subject: Subject, as_json: bool) -> None:
    """The result on stdout, as --json says."""
    if as_json:
        print_json(result)
    else:
        kind = "exact" if result["exact"] else "lossy"
        out.print(f"{result['method']} ({kind}): {text}\n{subject.where()}", highlight=False)
