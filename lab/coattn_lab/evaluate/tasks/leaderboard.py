"""The table of a model by itself: rows sized to budgets, what they need made beforehand, tasks and KL run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coattn.errors import CoattnError
from coattn.hf.architectures import describe_layers
from coattn.hf.load import Loaded
from coattn.text import Text
from coattn_lab.evaluate.tasks import budget as budgets
from coattn_lab.evaluate.tasks import needle_make, run
from coattn_lab.evaluate.tasks.calibrated import calibrated
from coattn_lab.evaluate.tasks.prompts import PromptFile, read_prompts, write_prompts
from coattn_lab.evaluate.tasks.row import Row

FILES = "calibrated"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What a table is of. budgets: shares of the KV; None, or none: rows as they are written. kl: steps of answers."""

    rows: Sequence[Row]
    budgets: Sequence[float | None]
    lengths: Sequence[int]
    text: Text
    kl: int
    plan: dict[str, Any]
    """The other settings of `run.plan`."""
    files: Path | None = None
    """Where what is calibrated lies; None: beside the results."""


def make_needles(loaded: Loaded, text: Text, lengths: Sequence[int], depths: int, seed: int, path: Path) -> PromptFile:
    """Prompts where nobody gave any: needles, which need no other package. A file that is there is read."""
    if not path.exists():
        made = needle_make.make(loaded.tokenizer, text, sorted(lengths), depths, seed)
        source = {"needle": {"text": text.name, "sha256": text.sha256}}
        write_prompts(path, made, {"command": "made by coattn eval table", "sources": source})
    return read_prompts(path)


def run_all(
    loaded: Loaded,
    prompts: PromptFile,
    asked: Asked,
    folder: Path,
    say: Say = lambda _: None,
    started: Callable[[int], run.Progress] = lambda _: lambda *_: None,
) -> dict[str, CoattnError]:
    """Every row at every budget and length, each length in a folder of its own -> rows that failed, and why.

    started: gets the tokens that a length will read and answer, and returns what hears of them.
    """
    failed: dict[str, CoattnError] = {}
    lengths = asked.lengths or sorted({prompt.length for prompt in prompts.prompts})
    for length in lengths:
        plan = run.plan(loaded, prompts, lengths=(length,), kl=asked.kl, **asked.plan)
        rows = prepare(loaded, plan, asked, asked.files or folder / FILES, say)
        total = sum(len(ask.ids) for ask in plan.asks) * (1 + len(rows) * len(plan.modes))
        _, lost = run.run(plan, rows, folder / str(length), started(total))
        failed |= {f"{name} at {length:,} tokens": error for name, error in lost.items()}
    return failed


def prepare(loaded: Loaded, plan: run.Plan, asked: Asked, files: Path, say: Say) -> list[Row]:
    """Rows as they are run at the plan's length: sized, with the files that they need; `full` first."""
    size = size_of(plan)
    found: dict[str, Row] = {}
    for share in asked.budgets or (None,):  # all rows at the first budget come first
        for row in asked.rows:
            made = row
            if "codebook" not in row.composed.params:  # codebooks go by the size, all others before it
                made = calibrated(made, loaded, asked.text, files, say)
            if share is not None:
                settled = budgets.settle(made, share, size)
                made = settled.row
                if made.name not in found:
                    say(budgets.describe(settled, size))
            made = calibrated(made, loaded, asked.text, files, say)
            found.setdefault(made.name, made)
    return sorted(found.values(), key=lambda row: row.name != "full")


def size_of(plan: run.Plan) -> budgets.Size:
    """What the rows of a plan of one length are sized for."""
    most, wanted = max(ask.length for ask in plan.asks), len(plan.asks) * len(plan.modes)
    return budgets.Size(describe_layers(plan.loaded.model), min(plan.batch, wanted), most)
