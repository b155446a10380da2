"""`coattn bench`: speed of the user's model on the user's machine, method beside method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
    load_model,
    model_options,
    numbers,
    out_option,
    parse_settings,
    settings_option,
    text_option,
    weights_option,
)
from coattn.cli.output import keep, out, print_json, progress, save, writable
from coattn.errors import ConfigError
from coattn.part import MOST_BATCH
from coattn.text import read_text
from coattn.units import format_bytes

Column = tuple[str, str, str]
"""Title, key of the row, and how `cell` writes it."""
KV = (("GPU KV", "gpu_kv", "bytes"), ("DRAM KV", "host_kv", "bytes"))
DECODED = (
    ("prompts, s", "prompt_s", ".2f"),
    ("step, ms", "step_s", "ms"),
    ("p99", "step_p99_s", "ms"),
    ("tokens/s", "tokens_per_s", ".1f"),
    ("KL", "kl", ".2g"),
    ("top-1", "top1", ".0%"),
)
PREFILLED = (
    ("tokens", "tokens", ","),
    ("first token, s", "first_token_s", ".2f"),
    ("tokens/s", "prompt_tokens_per_s", ",.0f"),
)
SERVED = (
    ("seconds", "total_s", ".2f"),
    ("tokens/s", "tokens_per_s", ".1f"),
    ("first token, s", "first_token_s", ".2f"),
    ("p99", "first_token_p99_s", ".2f"),
    ("between, ms", "between_s", "ms"),
    ("p99", "between_p99_s", "ms"),
    ("same", "same", ".0%"),
)


@click.group()
def bench() -> None:
    """Measure the speed of your model on this machine, through the engine that serves it.

    Prompts are pieces of a text. The answers of all methods are compared with those of the first. --set, --gpu-kv and
    --host-kv apply to all methods except full.
    """


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
        run.collect(run.measure.decode(run.loaded, run.candidates, windows, steps, chunk, report))
    run.finish(f", {batch} x {context:,} tokens", DECODED, batch=batch, context=context, steps=steps, chunk=chunk)


@bench.command()
@shared_options
@weights_option
@click.option("--lengths", default="1024,4096", callback=numbers, help="Lengths of the prompts in tokens.")
def prefill(lengths: list[int], **options: Any) -> None:
    """Measure the time to the first token of prompts that are read one after another."""
    run = Run(options)
    with run.bar(sum(lengths)) as report:
        for ids in run.prompts(lengths):
            item, weights = run.measure.Request(ids, 2), options["weights_on_gpu"]
            measured = run.measure.serve(run.loaded, run.candidates, [item], 1, weights, report)
            run.collect({"tokens": len(ids), **row} for row in measured)
    run.finish("", PREFILLED, lengths=lengths)


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
        weights = options["weights_on_gpu"]
        run.collect(run.measure.serve(run.loaded, run.candidates, items, max_batch, weights, report))
    said = {"lengths": lengths, "new_tokens": new_tokens, "rate": rate, "seed": seed, "max_batch": max_batch}
    run.finish(f", {count} requests", SERVED, requests=count, **said)
    if not options["as_json"]:
        out.print("same: share of an answer's tokens before it differs from the first method's", highlight=False)


class Run:
    """The model, the text, the candidates and the output of a benchmark."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Checks all options before it loads the model."""
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
        self.loaded = load_model(options, on_host=options.get("weights_on_gpu") is not None)
        self.rows: list[dict[str, Any]] = []

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Stretches of the text in tokens."""
        return self.measure.prompts(self.loaded, self.text, lengths)

    @contextmanager
    def bar(self, tokens: int) -> Iterator[Callable[[int], None]]:
        """A progress bar over the tokens of every candidate; yields what advances it."""
        with progress("bench", tokens * len(self.candidates)) as bar:
            yield lambda done: bar.advance(bar.task_ids[0], done)

    def collect(self, measured: Iterable[dict[str, Any]]) -> None:
        """Adds rows as they come; --out has those so far."""
        for row in measured:
            self.rows.append(row)
            keep(self.path, rows=self.rows)

    def finish(self, what: str, columns: Sequence[Column], **said: Any) -> None:
        """Writes the whole result, and prints it as --json says. what: of the title, behind the model."""
        from coattn.provenance import provenance

        dtype = str(self.loaded.model.dtype).removeprefix("torch.")
        text = {"name": self.text.name, "sha256": self.text.sha256}
        result = {"rows": self.rows, "model": self.loaded.name, "dtype": dtype, "text": text, **said, **provenance()}
        save(self.path, result)
        if self._as_json:
            print_json(result)
            return
        table = Table("method", title=f"{self.loaded.name} ({dtype}){what}")
        for title, _, _ in (*columns, *KV):
            table.add_column(title, justify="right")
        for row in self.rows:
            cells = [row["refused"]] if "refused" in row else [cell(row, *each) for _, *each in (*columns, *KV)]
            table.add_row(row["method"], *cells)
        out.print(table)


def cell(row: dict[str, Any], key: str, how: str) -> str:
    """A figure of a row for people. how: a format, or `ms` or `bytes`."""
    value = row["tokens"] / row["first_token_s"] if key == "prompt_tokens_per_s" else row[key]
    if value is None:
        return ""
    if how == "ms":
        return f"{1e3 * value:.1f}"
    return format_bytes(value) if how == "bytes" else format(value, how)
