"""The results of one model, a stage at a time: rows at equal GPU memory along texts, and MiniLongBench under `auto`.

    python lab/scripts/results_gpu.py MODEL OUT --data MINILONGBENCH [--texts FILE]... [--minutes 7]

OUT is a folder: `texts.json` and `mini.json` are the tables (with `.md` beside them), the folders of those names have a
file for each row; prompts, and what is calibrated, lie there too. They are written after every row, so that a run that
is cut off keeps what it did; one that ends with 3 because `--minutes` were over goes on with the same command. Stages
come in the order of their worth, and the model is loaded once. `--stages` names some; `--pack FILE` also keeps OUT as
one archive.
"""

from __future__ import annotations

import io
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from coattn.cli.evaluate import load_to_compare
from coattn.cli.options import parse_settings
from coattn.provenance import provenance
from coattn.text import Text, default_text, read_text
from coattn_lab.evaluate.results import write_json
from coattn_lab.evaluate.tasks import longbench_make, text_make
from coattn_lab.evaluate.tasks.budget import parse_budgets
from coattn_lab.evaluate.tasks.leaderboard import Asked, run_all
from coattn_lab.evaluate.tasks.prompts import PromptFile, read_prompts, write_prompts
from coattn_lab.evaluate.tasks.run import PausedError, Stage, parse_rows
from coattn_lab.evaluate.tasks.table import lines, overall, page, read_results

KEPT = "full", "full,gpu_dtype=int8", "full,gpu_dtype=int4"
SIZED = "auto", "scout", "hgca", "quest", "pqcache", "streaming"
MADE = "hcattention", "infinigen,alpha=1000"
MORE = "snapkv", "h2o", "tova", "duo"
OTHER = "hcattention,tau=0.98", "hgca,beta=0.5", "infinigen"
"""Rows: those that have one size, those whose size is set, those that need a file made first, those that come last, and
other settings of some."""
UNFINISHED = 3


@dataclass(frozen=True)
class Part:
    """A stage. table: the file and folder of its results. prompts: the name of its prompts."""

    table: str
    prompts: str
    rows: Sequence[str]
    budget: str
    batch: int
    kl: int
    mode: str = "fed"


STAGES = {
    "eighth": Part("texts", "texts", (*KEPT, *SIZED), "12.5%", 4, 64),
    "eighth_made": Part("texts", "texts", MADE, "12.5%", 4, 64),
    "mini": Part("mini", "mini", ("full", "auto"), "12.5%,own", 24, 0, "read"),
    "quarter": Part("texts", "texts", (*SIZED, *MADE), "25%", 4, 64),
    "sixteenth": Part("texts", "texts", (*SIZED, *MADE), "6.25%", 4, 64),
    "settings": Part("texts", "texts", OTHER, "12.5%", 4, 64),
    "own": Part("texts", "texts", ("auto", "scout", "hgca", "hcattention", "pqcache"), "own", 4, 64),
    "more": Part("texts", "texts", MORE, "12.5%", 4, 64),
    "mini_rest": Part("mini/rest", "mini_rest", ("full", "auto"), "12.5%,own", 24, 0, "read"),
}


def say(text: str) -> None:
    """With the time, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def prompts_of(name: str, out: Path, loaded: Any, options: dict[str, Any]) -> PromptFile | None:
    """The prompts of a stage, made once; None without the data that they are made of."""
    path, lengths = out / f"{name}.jsonl.gz", sorted(options["length"])
    if not path.exists():
        if name == "texts":
            texts = [read_text(each) for each in options["texts"]] or [default_text(), code()]
            made = text_make.make(loaded.tokenizer, texts, lengths[-1:], options["windows"])
            sources: dict[str, Any] = {"text": [each.as_dict() for each in texts]}
        elif options["data"] is None:
            return None
        else:
            skip = 0 if name == "mini" else options["samples"]
            samples = options["samples"] if name == "mini" else 1 << 20
            folder = Path(options["data"])
            made, sha256 = longbench_make.make(folder, loaded.tokenizer, lengths, samples, skip=skip)
            sources = {"longbench": {"sha256": sha256, "skip": skip}}
        origin = {key: value for key, value in provenance().items() if key in ("command", "commit", "tree")}
        write_prompts(path, made, {"sources": sources, **origin})
    return read_prompts(path)


def code() -> Text:
    """Source that ships with Python, on every machine."""
    import argparse
    import ast
    import datetime
    import decimal
    import inspect
    import typing

    named = argparse, ast, datetime, decimal, typing
    return Text("python source", "\n\n".join(inspect.getsource(each) for each in named))


def run(
    part: Part, prompts: PromptFile, out: Path, loaded: Any, stage: Stage, keep: Callable[[], None]
) -> dict[str, Any]:
    """The rows of a stage that are missing -> those that failed, and why. Raises PausedError where the time is over.

    keep: called when a row is through.
    """
    rows = parse_rows(("full", *part.rows), parse_settings)
    plan = {"modes": (part.mode,), "batch": part.batch, "stage": stage}
    asked = Asked(rows, parse_budgets(part.budget), (), default_text(), part.kl, plan, out / "calibrated")
    now = ""

    def progress(what: str, _by: int) -> None:
        nonlocal now
        if what != now:
            say(what)
            keep()
        now = what

    return run_all(loaded, prompts, asked, out / part.table, say, lambda _: progress)


def write_table(folder: Path) -> None:
    """The table of a folder of rows, beside it."""
    if not list(folder.rglob("*.json")):
        return
    found = read_results([folder])
    data = {"lines": lines(found), "overall": overall(found), "faults": [why for row in found for why in row.faults]}
    write_json(folder.with_suffix(".json"), {"evaluation": "table", **data, **provenance()})
    folder.with_suffix(".md").write_text(page(data["lines"], found), encoding="utf-8")


def pack(out: Path, target: Path) -> None:
    """All of a folder but what is calibrated, as one archive, which appears when it is whole."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(out, out.name, filter=lambda each: None if each.name.endswith(".safetensors") else each)
    fresh = target.with_name(f".{target.name}")
    fresh.write_bytes(buffer.getvalue())
    fresh.replace(target)


def _numbers(_context: Any, _parameter: Any, text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


@click.command(help=__doc__)
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--data", help="MiniLongBench's folder; without it, texts alone.")
@click.option("--texts", multiple=True, help="UTF-8 files; left out, Python's help topics and source of its library.")
@click.option("--windows", default=2, show_default=True, help="Parts of each text.")
@click.option("--samples", default=2, show_default=True, help="Prompts of each dataset in the first stage of it.")
@click.option("--length", default="4096,8192,16384,30720", show_default=True, callback=_numbers)
@click.option("--stages", default=",".join(STAGES), show_default=True)
@click.option("--rows", help="Of the rows of the stages these methods alone, with commas.")
@click.option("--steps", type=int, help="Steps along a text; left out, 64.")
@click.option("--pack", "target", type=click.Path(path_type=Path))
@click.option("--minutes", default=7.0, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--device", default="auto", show_default=True)
def main(model: str, out: Path, target: Path | None, minutes: float, **options: Any) -> None:
    """See above."""
    stage = Stage(time.monotonic() + 60 * minutes)
    out.mkdir(parents=True, exist_ok=True)
    loaded = load_to_compare({"model": model, "dtype": options["dtype"], "device": options["device"]})
    say(f"loaded {loaded.name}")
    whole = True
    for name in options["stages"].split(","):
        part, started = STAGES[name], time.monotonic()
        if options["steps"] and part.kl:
            part = replace(part, kl=options["steps"])
        if options["rows"]:
            part = replace(part, rows=[row for row in part.rows if row.split(",")[0] in options["rows"].split(",")])
        prompts = prompts_of(part.prompts, out, loaded, options)
        if prompts is None:
            say(f"{name}: left out, --data is missing")
            continue

        def keep(table: Path = out / Path(part.table).parts[0]) -> None:
            write_table(table)
            if target is not None:
                pack(out, target)

        try:
            for row, why in run(part, prompts, out, loaded, stage, keep).items():
                say(f"{name}: {row} failed: {why}")
        except PausedError:
            whole = False
        finally:
            keep()
        say(f"{name}: {time.monotonic() - started:.0f} s")
        if not whole:
            break
    sys.exit(0 if whole else UNFINISHED)


if __name__ == "__main__":
    main()
