"""`coattn bench`: speed of the user's model on the user's machine, method beside method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from coattn.cli.options import (
    Number,
    count_option,
    gpu_kv_option,
    host_kv_option,
    join,
    json_option,
    model_options,
    out_option,
    parse_settings,
    settings_option,
    text_option,
    weights_option,
)
from coattn.cli.output import keep, model_progress, out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn.part import MOST, MOST_BATCH
from coattn.text import read_text
from coattn.units import format_bytes


@click.group()
def bench() -> None:
    """Measure the speed of your model on this machine, through the engine that serves it.

    Prompts are pieces of a text. The answers of all methods are compared with those of the first. --set, --gpu-kv and
    --host-kv apply to all methods except full.
    """


def numbers(_context: Any, parameter: Any, value: str | None) -> list[int] | None:
    """`"1,4,8"` -> `[1, 4, 8]`."""
    if value is None:
        return None
    try:
        made = [int(part) for part in value.split(",")]
    except ValueError:
        made = []
    most = MOST_BATCH if parameter.name == "batch" else MOST
    if not made or min(made) < 1 or max(made) > most:
        raise ConfigError(
            f"--{parameter.name.replace('_', '-')} is {value!r}.",
            f"Write numbers from 1 to {most} with commas, like 1,4,8.",
        )
    return made


shared_options = join(
    model_options,
    click.option("--methods", default="full,auto", help="Names from `coattn methods`, with commas."),
    gpu_kv_option,
    host_kv_option,
    settings_option,
    text_option,
    out_option,
    json_option,
)


@bench.command()
@shared_options
@count_option("--batch", 1, "Sequences that decode together.", most=MOST_BATCH)
@count_option("--context", 4096, "Length of each in tokens.", 8)
@count_option("--steps", 32, "Decode steps, at the end of the context.", 2)
@count_option("--chunk", 2048, "Prompt tokens read in a step.")
def decode(batch: int, context: int, steps: int, chunk: int, **options: Any) -> None:
    """Measure the decode step of sequences of one length, and how far its predictions are from the first method's."""
    if steps >= context:
        raise ConfigError(f"--steps is {steps}, but --context is only {context}.", "Raise --context.")
    run = Run(options)
    import torch

    windows = torch.tensor(run.prompts([context] * batch))
    with run.bar(batch * context) as report:
        rows = run.rows(run.measure.decode(run.loaded, run.candidates, windows, steps, chunk, report))
    result = run.finish(rows, batch=batch, context=context, steps=steps, chunk=chunk)
    if options["as_json"]:
        return
    titles = ("method", "prompts, s", "step, ms", "p99", "tokens/s", "KL", "top-1", "GPU KV", "DRAM KV")
    show(f"{run.title}, {batch} x {context:,} tokens", titles, result["rows"], _decoded)


@bench.command()
@shared_options
@weights_option
@click.option("--lengths", default="1024,4096", callback=numbers, help="Lengths of the prompts in tokens.")
def prefill(lengths: list[int], **options: Any) -> None:
    """Measure the time to the first token of prompts that are read one after another."""
    run = Run(options)
    made = [run.measure.Request(ids, 2) for ids in run.prompts(lengths)]
    with run.bar(sum(lengths)) as report:
        rows = []
        for item in made:
            measured = run.measure.serve(run.loaded, run.candidates, [item], 1, options["weights_on_gpu"], report)
            rows += [{"tokens": len(item.ids), **row} for row in run.rows(measured)]
    result = run.finish(rows, lengths=lengths)
    if not options["as_json"]:
        titles = ("method", "tokens", "first token, s", "tokens/s", "GPU KV", "DRAM KV")
        show(run.title, titles, result["rows"], _prefilled)


@bench.command()
@shared_options
@weights_option
@count_option("--requests", 16, "Number of requests.", as_name="count")
@click.option("--rate", type=Number(0, min_open=True), help="Requests that arrive per second.  [default: all at once]")
@click.option("--lengths", default="512,2048", callback=numbers, help="Lengths of the prompts in tokens, used in turn.")
@count_option("--new-tokens", 64, "Length of each answer in tokens.", 2)
@count_option("--max-batch", 8, "Requests that run at the same time.", most=MOST_BATCH)
@count_option("--seed", 0, "Seed of the arrival times.", 0)
def requests(
    count: int, rate: float | None, lengths: list[int], new_tokens: int, max_batch: int, seed: int, **options: Any
) -> None:
    """Measure a stream of requests: tokens per second, and how long users wait."""
    run = Run(options)
    each = [lengths[i % len(lengths)] for i in range(count)]
    arrivals = run.measure.arrivals(count, rate, seed)
    items = [run.measure.Request(ids, new_tokens, at) for ids, at in zip(run.prompts(each), arrivals, strict=True)]
    with run.bar(sum(each) + count * new_tokens) as report:
        measured = run.measure.serve(run.loaded, run.candidates, items, max_batch, options["weights_on_gpu"], report)
        rows = run.rows(measured)
    said = {"lengths": lengths, "new_tokens": new_tokens, "rate": rate, "seed": seed, "max_batch": max_batch}
    result = run.finish(rows, requests=count, **said)
    if options["as_json"]:
        return
    times = ("seconds", "tokens/s", "first token, s", "p99", "between, ms", "p99")
    titles = ("method", *times, "same", "GPU KV", "DRAM KV")
    show(f"{run.title}, {count} requests", titles, result["rows"], _served)
    out.print("same: share of an answer's tokens before it differs from the first method's", highlight=False)


class Run:
    """The model, the text, the candidates and the output of a benchmark."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Checks all options before it loads the model."""
        from coattn.hf.load import load
        from coattn.method.row import compose
        from coattn.method.table import find_method
        from coattn.tools import bench as measure

        self.path, self.measure, self._as_json = writable(options["target"]), measure, options["as_json"]
        params, budgets = parse_settings(options["settings"]), (options["gpu_kv"], options["host_kv"])
        names = options["methods"].split(",")
        self.candidates = [measure.Candidate(name, *(() if name == "full" else (params, *budgets))) for name in names]
        for each in self.candidates:
            compose(find_method(each.method), **each.params)
        self.text = read_text(options["text_file"])
        with model_progress() as bar:
            self.loaded = load(
                options["model"],
                dtype=options["dtype"],
                device=options["device"],
                on_host=options.get("weights_on_gpu") is not None,
                on_progress=bar,
            )
        self.dtype = str(self.loaded.model.dtype).removeprefix("torch.")
        self.title = f"{self.loaded.name} ({self.dtype})"

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Stretches of the text in tokens."""
        return self.measure.prompts(self.loaded, self.text, lengths)

    @contextmanager
    def bar(self, tokens: int) -> Iterator[Callable[[int], None]]:
        """A progress bar over the tokens of every candidate; yields what advances it."""
        with progress("bench", tokens * len(self.candidates)) as bar:
            yield lambda done: bar.advance(bar.task_ids[0], done)

    def rows(self, measured: Iterable[Any]) -> list[dict[str, Any]]:
        """Rows as they come; --out has those so far."""
        found: list[dict[str, Any]] = []
        for row in measured:
            found.append(asdict(row))
            keep(self.path, rows=found)
        return found

    def finish(self, rows: list[dict[str, Any]], **said: Any) -> dict[str, Any]:
        """The whole result, written and, with --json, printed."""
        from coattn.provenance import provenance

        text = {"name": self.text.name, "sha256": self.text.sha256}
        result = {"rows": rows, "model": self.loaded.name, "dtype": self.dtype, "text": text, **said, **provenance()}
        save(self.path, result)
        if self._as_json:
            print_json(result)
        return result


def show(title: str, titles: Sequence[str], rows: Sequence[dict[str, Any]], cells: Callable[[Any], list[str]]) -> None:
    """The table for people."""
    table = Table(title=title)
    for name in titles:
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        if "refused" in row:
            table.add_row(row["method"], row["refused"])
        else:
            kv = (format_bytes(row["gpu_kv"]), format_bytes(row["host_kv"]))
            table.add_row(row["method"], *cells(row), *kv)
    out.print(table)


def _decoded(row: dict[str, Any]) -> list[str]:
    close = ["", ""] if row["kl"] is None else [f"{row['kl']:.2g}", f"{row['top1']:.0%}"]
    times = [f"{1e3 * row['step_s']:.1f}", f"{1e3 * row['step_p99_s']:.1f}", f"{row['tokens_per_s']:.1f}"]
    return [f"{row['prompt_s']:.2f}", *times, *close]


def _prefilled(row: dict[str, Any]) -> list[str]:
    return [f"{row['tokens']:,}", f"{row['first_token_s']:.2f}", f"{row['tokens'] / row['first_token_s']:,.0f}"]


def _served(row: dict[str, Any]) -> list[str]:
    times = [f"{row['first_token_s']:.2f}", f"{row['first_token_p99_s']:.2f}"]
    gaps = [f"{1e3 * row['between_s']:.1f}", f"{1e3 * row['between_p99_s']:.1f}"]
    same = "" if row["same"] is None else f"{row['same']:.0%}"
    return [f"{row['total_s']:.2f}", f"{row['tokens_per_s']:.1f}", *times, *gaps, same]
