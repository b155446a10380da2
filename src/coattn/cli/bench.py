"""`coattn bench`: speed of the user's model on the user's machine, method beside method."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from coattn.cli.options import (
    count_option,
    fits,
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
from coattn.cli.output import keep, print_json, print_line, print_table, progress, save, writable
from coattn.errors import ConfigError
from coattn.part import MOST_BATCH
from coattn.text import read_text
from coattn.units import format_bytes

Column = tuple[str, str, Callable[[Any], str]]
"""Title, key of the row, and how the figure is written for people."""


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{1e3 * seconds:.1f}"


KV = (("GPU KV", "gpu_kv", format_bytes), ("DRAM KV", "host_kv", format_bytes))
DECODED = (
    ("prompts, s", "prompt_s", "{:.2f}".format),
    ("step, ms", "step_s", ms),
    ("p99", "step_p99_s", ms),
    ("tokens/s", "tokens_per_s", "{:.1f}".format),
    ("KL", "kl", "{:.2g}".format),
    ("top-1", "top1", "{:.0%}".format),
)
PREFILLED = (
    ("tokens", "tokens", "{:,}".format),
    ("first token, s", "first_token_s", "{:.2f}".format),
    ("tokens/s", "prompt_tokens_per_s", "{:,.0f}".format),
)
SERVED = (
    ("seconds", "total_s", "{:.2f}".format),
    ("tokens/s", "tokens_per_s", "{:.1f}".format),
    ("first token, s", "first_token_s", "{:.2f}".format),
    ("p99", "first_token_p99_s", "{:.2f}".format),
    ("between, ms", "between_s", ms),
    ("p99", "between_p99_s", ms),
    ("same", "same", "{:.0%}".format),
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
def decode(batch: int, context: int, steps: int, **options: Any) -> None:
    """Measure the decode step of sequences of one length, and how far its predictions are from the first method's."""
    if steps >= context:
        raise ConfigError(f"--steps is {steps}, but --context is only {context}.", "Raise --context.")
    run = Run(options, context)
    import torch

    windows = torch.tensor(run.prompts(lengths=[context] * batch))
    run.measure(partial(run.tools.decode, windows=windows, new_tokens=steps), run.tools.compare_predictions)
    run.finish(f", {batch} x {context:,} tokens", DECODED, batch=batch, context=context, steps=steps)


@bench.command()
@shared_options
@weights_option
@click.option("--lengths", default="1024,4096", callback=numbers, help="Lengths of the prompts in tokens.")
def prefill(lengths: list[int], weights_on_gpu: float | None, **options: Any) -> None:
    """Measure the time to the first token of prompts that are read one after another."""
    run = Run(options, max(lengths), on_host=weights_on_gpu is not None)
    for ids in run.prompts(lengths=lengths):
        serve = partial(run.tools.serve, prompts=[ids], new_tokens=2, max_batch=1, weights_on_gpu=weights_on_gpu)
        run.measure(serve, run.tools.compare_answers, tokens=len(ids))
    for row in run.rows:
        if "refused" not in row:
            row["prompt_tokens_per_s"] = row["tokens"] / row["first_token_s"]
    run.finish("", PREFILLED, lengths=lengths)


@bench.command()
@shared_options
@weights_option
@count_option("--requests", 16, "Number of requests, which arrive at the same time.")
@click.option("--lengths", default="512,2048", callback=numbers, help="Lengths of the prompts in tokens, used in turn.")
@count_option("--new-tokens", 64, "Length of each answer in tokens.", 2)
@count_option("--max-batch", 8, "Requests that run at the same time.", most=MOST_BATCH)
def requests(lengths: list[int], weights_on_gpu: float | None, **options: Any) -> None:
    """Measure many requests: tokens per second, and how long users wait."""
    count = options["requests"]
    limits = {name: options[name] for name in ("new_tokens", "max_batch")}
    run = Run(options, max(lengths), on_host=weights_on_gpu is not None)
    prompts = run.prompts(lengths=[lengths[i % len(lengths)] for i in range(count)])
    serve = partial(run.tools.serve, prompts=prompts, weights_on_gpu=weights_on_gpu, **limits)
    run.measure(serve, run.tools.compare_answers)
    run.finish(f", {count} requests", SERVED, requests=count, lengths=lengths, **limits)
    if not options["as_json"]:
        print_line("same: share of an answer's tokens before it differs from the first method's")


class Run:
    """The model, the text, the candidates and the output of a benchmark."""

    def __init__(self, options: dict[str, Any], tokens: int, on_host: bool = False) -> None:
        """Checks all options before it loads the model. tokens: of the longest prompt."""
        from coattn.method.row import compose
        from coattn.method.table import find_method
        from coattn.tools import bench as tools

        self.path, self.tools, self._as_json = writable(options["target"]), tools, options["as_json"]
        params, budgets = parse_settings(options["settings"]), (options["gpu_kv"], options["host_kv"])
        names = options["methods"].split(",")
        self.candidates = [tools.Candidate(name, *(() if name == "full" else (params, *budgets))) for name in names]
        for each in self.candidates:
            compose(find_method(each.method), **each.params)
        self.text = read_text(options["text_file"])
        self.loaded = load_model(options, on_host, check=fits("A prompt's length", tokens, options["model"]))
        self.prompts = partial(tools.prompts, self.loaded, self.text)
        self.rows: list[dict[str, Any]] = []

    def measure(self, run: Any, compare: Any, **said: Any) -> None:
        """Adds a row of each candidate with what is said of them; --out has those so far."""
        with progress("bench", len(self.candidates)) as bar:
            for row in self.tools.rows(self.candidates, partial(run, self.loaded), compare):
                self.rows.append({**said, **row})
                keep(self.path, rows=self.rows)
                bar.advance(bar.task_ids[0])

    def finish(self, what: str, columns: Sequence[Column], **said: Any) -> None:
        """Writes the whole result, and prints it as --json says. what: of the title, behind the model."""
        from coattn.provenance import provenance

        dtype = str(self.loaded.model.dtype).removeprefix("torch.")
        model = {"model": self.loaded.name, "dtype": dtype, "text": self.text.as_dict()}
        result = {"rows": self.rows, **model, **said, **provenance()}
        save(self.path, result)
        if self._as_json:
            print_json(result)
            return
        columns = (*columns, *KV)
        lines = (
            (row["method"], *([row["refused"]] if "refused" in row else [write(row[key]) for _, key, write in columns]))
            for row in self.rows
        )
        title = f"{self.loaded.name} ({dtype}){what}"
        print_table(("method", *(f">{name}" for name, _, _ in columns)), lines, title)
