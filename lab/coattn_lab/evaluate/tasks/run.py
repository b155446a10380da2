"""Rows over a file of prompts: read once, answered under every row, kept in one file a row."""

from __future__ import annotations

import gc
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coattn.errors import BudgetError, CoattnError, ConfigError
from coattn.hf.converted import sha256_of
from coattn.hf.load import Loaded
from coattn.units import parse_share
from coattn_lab.evaluate.results import Results, describe
from coattn_lab.evaluate.sweep import expand
from coattn_lab.evaluate.tasks import following
from coattn_lab.evaluate.tasks.calibrated import FILES
from coattn_lab.evaluate.tasks.prompts import PromptFile
from coattn_lab.evaluate.tasks.reading import MODES, Ask, Held, encode_all, read_all, waves
from coattn_lab.evaluate.tasks.row import Row
from coattn_lab.evaluate.tasks.running import Running, ask_name, run_row
from coattn_lab.evaluate.tasks.summary import summarise

SAVE = 5.0
"""Seconds between two writes of a row's file: what is lost when a run is cut off."""
Progress = Callable[[str, int], None]
"""`(what is done, by how much the bar advances)`; tokens of prompts are counted, read and answered."""


class PausedError(Exception):
    """The time of a stage is over. What is done is kept; the same run goes on from there."""


@dataclass
class Stage:
    """Rows that one command runs: none begins after `until`, of `time.monotonic`, but for the first."""

    until: float
    rows: int = 0

    def check(self) -> None:
        """Raises PausedError where the time is over."""
        if self.rows and time.monotonic() > self.until:
            raise PausedError


def parse_rows(texts: Sequence[str], parse: Any) -> list[Row]:
    """`full,scout,budget=1024|2048,quest` -> rows; what has an equals sign belongs to the row before it.

    `gpu_share=1/8` is no parameter of a method: it is the row's GPU memory, as a share of the KV.
    """
    specs: list[list[str]] = []
    for word in (word.strip() for text in texts for word in text.split(",")):
        if not word:
            continue
        if "=" not in word:
            specs.append([word])
        elif not specs:
            raise ConfigError(f"{word!r} stands before any row.", "Write rows like full,scout,budget=1024.")
        else:
            specs[-1].append(word)
    if not specs:
        raise ConfigError("There are no rows.", "Write rows like full,scout,budget=1024.")
    found = [row for spec in specs for row in _rows(spec, parse)]
    return list({row.name: row for row in found}.values())


def _rows(spec: list[str], parse: Any) -> list[Row]:
    shares: list[str | None] = [None]
    for word in spec[1:]:
        if word.startswith("gpu_share="):
            shares = list(word.removeprefix("gpu_share=").split("|"))
    rest = ",".join(word for word in spec if not word.startswith("gpu_share="))
    return [
        Row(
            row.name if share is None else f"{row.name},gpu_share={share}",
            row.composed,
            parse_share(share, "gpu_share"),
        )
        for row in expand(rest, parse)
        for share in shares
    ]


def file_of(folder: Path, row: Row) -> Path:
    """Where a row's result lies."""
    return folder / f"{re.sub(r'[^A-Za-z0-9.]+', '_', row.name).strip('_')}.json"


@dataclass(frozen=True)
class Plan:
    """What is run: which prompts, in which modes, how."""

    loaded: Loaded
    prompts: PromptFile
    asks: tuple[Ask, ...]
    modes: tuple[str, ...]
    batch: int
    chat: bool
    whole: bool
    hold: int | None
    model_sha256: str | None
    kl: int = 0
    """Tokens of full attention's answers along which rows are compared with it; 0: they are not."""
    stage: Stage | None = None

    def order(self) -> list[str]:
        """Names of all answers of a row."""
        return [ask_name(ask.prompt, mode) for ask in self.asks for mode in self.modes]

    def config(self, row: Row) -> dict[str, Any]:
        """All that decides a row's outcome."""
        return {
            "evaluation": "tasks",
            "model": self.loaded.name,
            "model_sha256": self.model_sha256,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            **_described(row),
            "named": row.name,
            "asked": row.asked or row.name,
            "gpu_share": row.gpu_share,
            "budget": row.budget,
            "budget_why": row.why,
            "files": _files(row),
            "prompts": self.prompts.sha256,
            "made": {key: self.prompts.about.get(key) for key in ("command", "commit", "sources")},
            "lengths": sorted({ask.prompt.length for ask in self.asks}),
            "prompt_count": len(self.asks),
            "modes": list(self.modes),
            "chat": self.chat,
            "whole_answers": self.whole,
        }


def _described(row: Row) -> dict[str, Any]:
    """Files by their names alone: where they lie decides nothing."""
    found = describe(row.composed)
    params = {k: Path(v).name if k in FILES and v is not None else v for k, v in found["params"].items()}
    return {**found, "params": params}


def _files(row: Row) -> dict[str, Any] | None:
    """What the files of a row hold, and what they were made of where that is known."""
    params = row.composed.params
    named = {name: Path(params[name]) for name in FILES if params.get(name)}
    known = {name: sha256_of(path) for name, path in named.items() if path.is_file()}
    return {name: {"sha256": sha, "origin": row.files.get(name)} for name, sha in known.items()} or None


def plan(
    loaded: Loaded,
    prompts: PromptFile,
    *,
    modes: Sequence[str] = MODES,
    lengths: Sequence[int] = (),
    tasks: Sequence[str] = (),
    limit: int | None = None,
    batch: int = 16,
    chat: bool = True,
    whole: bool = False,
    hold: int | None = None,
    kl: int = 0,
    stage: Stage | None = None,
) -> Plan:
    """Chooses prompts and turns them into tokens. limit: so many of each task and length, the first ones."""
    for name, wanted, there in (
        ("mode", modes, MODES),
        ("length", lengths, sorted({prompt.length for prompt in prompts.prompts})),
        ("task", tasks, list(dict.fromkeys(prompt.task for prompt in prompts.prompts))),
    ):
        unknown = [each for each in wanted if each not in there]
        if unknown:
            raise ConfigError(f"There is no {name} {unknown[0]!r}.", f"There are {', '.join(map(str, there))}.")
    counts: dict[tuple[str, int], int] = {}
    chosen = []
    for prompt in prompts.prompts:
        if (lengths and prompt.length not in lengths) or (tasks and prompt.task not in tasks):
            continue
        key = prompt.task, prompt.length
        counts[key] = counts.get(key, 0) + 1
        if limit is None or counts[key] <= limit:
            chosen.append(prompt)
    if not chosen:
        raise ConfigError("No prompt is left.", "Give other --lengths or --tasks.")
    asks = tuple(encode_all(chosen, loaded, chat))
    if any(ask.follows for ask in asks):
        short = next((ask for ask in asks if not ask.follows or len(ask.ids) - ask.split < kl + 2), None)
        if short is not None or not kl:
            raise ConfigError(
                f"Rows are compared along texts over {kl} tokens (--kl), which these prompts do not all have.",
                "Give texts alone, of `coattn-lab eval tasks make --benchmarks text`, and a --kl from 1 to 128.",
            )
        modes = ("fed",)
    sha256 = weights_sha256(loaded)
    return Plan(loaded, prompts, asks, tuple(dict.fromkeys(modes)), batch, chat, whole, hold, sha256, kl, stage)


def weights_sha256(loaded: Loaded) -> str | None:
    """The hash of the GGUF file, or of the files of weights in the folder; None where neither is known."""
    if loaded.sha256 is not None or loaded.path is None:
        return loaded.sha256
    files = sorted(loaded.path.glob("*.safetensors"))
    lines = "".join(f"{path.name} {sha256_of(path)}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest() if len(files) != 1 else sha256_of(files[0])


def run(
    plan: Plan, rows: Sequence[Row], folder: Path, progress: Progress = lambda *_: None
) -> tuple[list[dict[str, Any]], dict[str, CoattnError]]:
    """Every row over every prompt -> the results of the rows that came through, and why others did not.

    The loop: prompts of one length, as many as can be held; read each once; then row after row answers all. What
    a cut-off run has finished is not done again. A row that fails, such as one whose budget is too small, ends alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = {
        row.name: Results(file_of(folder, row), plan.config(row), summarise, items="items", key="item", every=SAVE)
        for row in rows
    }
    failed: dict[str, CoattnError] = {}
    try:
        for wave in waves(plan.asks, plan.loaded.model, plan.hold):
            _wave(plan, [row for row in rows if row.name not in failed], results, wave, failed, progress)
    finally:
        for result in results.values():
            result.save()
    done = []
    for row in rows:
        if row.name not in failed:
            done.append(results[row.name].finish(plan.order()))
    return done, failed


def _wave(
    plan: Plan,
    rows: Sequence[Row],
    results: dict[str, Results],
    wave: list[Ask],
    failed: dict[str, CoattnError],
    progress: Progress,
) -> None:
    length = wave[0].prompt.length
    most = max(ask.length for ask in plan.asks if ask.prompt.length == length)
    missing = {
        row.name: [
            (ask, mode)
            for ask in wave
            for mode in plan.modes
            if ask_name(ask.prompt, mode) not in results[row.name].done
        ]
        for row in rows
    }
    wanted = {ask.prompt.name for row in rows for ask, _ in missing[row.name]}
    todo = [ask for ask in wave if ask.prompt.name in wanted]
    label = f"{length:,} tokens"
    if todo and plan.stage is not None:
        plan.stage.check()
    held = {
        each.ask.prompt.name: each
        for each in read_all(todo, plan.loaded, lambda tokens: progress(f"{label}: reading", tokens))
    }
    _give_back()
    left = [row for row in rows if missing[row.name]]
    _rows_of_wave(plan, left, results, missing, held, most, failed, progress)
    held.clear()
    _give_back()


def _rows_of_wave(
    plan: Plan,
    rows: Sequence[Row],
    results: dict[str, Results],
    missing: dict[str, list[tuple[Ask, str]]],
    held: dict[str, Held],
    most: int,
    failed: dict[str, CoattnError],
    progress: Progress,
) -> None:
    """Row after row over the prompts that were read."""
    reference = None
    for row in rows:
        if plan.stage is not None:
            plan.stage.check()
            plan.stage.rows += 1
        length = missing[row.name][0][0].prompt.length
        follows = any(ask.follows for ask, _ in missing[row.name])
        compared = plan.kl and (follows or not _has_kl(results[row.name], length))
        if compared and reference is None:
            chosen = following.choose(list(held.values()), plan.kl, most, plan.batch)
            if chosen:
                reference = following.refer(plan.loaded, chosen, steps=plan.kl, batch=plan.batch, most=most)
                _give_back()
        try:
            answers = missing[row.name]
            _row(plan, row, results[row.name], answers, held, most, progress, reference if compared else None)
        except CoattnError as error:
            failed[row.name] = error
        except torch.OutOfMemoryError:
            failed[row.name] = BudgetError(
                f"{row.name} at {length:,} tokens needs more GPU memory than there is.", "Lower --batch or --hold."
            )
        _give_back()


def _row(
    plan: Plan,
    row: Row,
    result: Results,
    left: list[tuple[Ask, str]],
    held: dict[str, Held],
    most: int,
    progress: Progress,
    reference: following.Reference | None,
) -> None:
    def note(found: Running) -> None:
        keep_run(result, found)

    def compared(found: Running) -> None:
        """At once: a row that is cut off later has fewer prompts left to be compared on."""
        result.notes.setdefault("runs", {}).setdefault(str(found.length), {})["answer_kl"] = found.answer_kl

    pairs = [(held[ask.prompt.name], mode) for ask, mode in left]
    answers = run_row(
        plan.loaded,
        row,
        pairs,
        batch=plan.batch,
        most=most,
        whole=plan.whole,
        note=note,
        compared=compared,
        reference=reference,
    )
    tokens = {ask_name(ask.prompt, mode): len(ask.ids) for ask, mode in left}
    for item in answers:
        result.add(item)
        progress(f"{item['length']:,} tokens: {row.name}", tokens[item["item"]])
    order = plan.order()
    if all(name in result.done for name in order):
        result.finish(order)  # a run that is cut off has whole rows
    else:
        result.save()


def _has_kl(result: Results, length: int) -> bool:
    run = (result.notes.get("runs") or {}).get(str(length)) or {}
    return run.get("answer_kl") is not None


def _give_back() -> None:
    """Engines and handles refer to each other, and to KV; the next engine asks the GPU what is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def keep_run(result: Results, found: Running) -> None:
    """Notes what a length took. Of several parts the largest batch speaks for all; their seconds add up."""
    runs: dict[str, Any] = result.notes.setdefault("runs", {})
    new, old = found.as_dict(), runs.get(str(found.length))
    if old is not None and len(old) == 1:
        new["answer_kl"] = old["answer_kl"]
    elif old is not None:
        seconds = round(old["seconds"] + new["seconds"], 2)
        preemptions = old["preemptions"] + new["preemptions"]
        kl = old.get("answer_kl") or new["answer_kl"]
        larger = old if old["batch"] >= new["batch"] else new
        new = {**larger, "seconds": seconds, "preemptions": preemptions, "answer_kl": kl}
    runs[str(found.length)] = new
    result.notes["seconds"] = round(sum(each["seconds"] for each in runs.values()), 1)
