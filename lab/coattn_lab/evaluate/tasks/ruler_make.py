"""RULER's 13 tasks (Hsieh et al., 2024) as prompts, by its own generators and its own data."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coattn.errors import ConfigError, InputError
from coattn.tools.evaluate.haystack import tokenise
from coattn_lab.evaluate.tasks.prompts import Prompt

TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
SECONDS = 600
"""For one task at one length. The generators try again for ever where nothing fits, so somebody must end them."""
LEAST = 1024
ROOM = 64
"""Tokens that are left free where a prompt ends at the model's last position: one of the generators counts without the
answer, and a text in a template can have a token more."""
MARK = 6
"""Characters by which the question and the answer's beginning are found: what stands before their first blank."""


def check_package() -> None:
    """Raises ConfigError where RULER's package, or what its generators import, is not installed."""
    for name in ("long_context_eval", "nltk", "wonderwords", "tenacity", "scipy"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"RULER's generators need the package {name}, which is not installed.",
                "Install the extra: pip install 'coattn[eval]'.",
            )


def make(
    tokenizer: Any,
    lengths: Sequence[int],
    samples: int,
    seed: int,
    tasks: Sequence[str] = TASKS,
    most: int | None = None,
    done: Callable[[str], None] = lambda _: None,
    seconds: float = SECONDS,
) -> list[Prompt]:
    """`samples` prompts of each task at each length, answer included. done hears of every task that is made.

    most: what the model has positions for. Chat templates come on top of a length, as long as that fits.

    Half a minute a task on a core, most of it in a list of six million words; tasks are made side by side.
    """
    check_package()
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise ConfigError(f"RULER has no task {unknown[0]!r}.", f"It has {', '.join(TASKS)}.")
    if min(lengths) < LEAST:
        raise ConfigError(f"RULER's prompts cannot be as short as {min(lengths):,}.", f"Give {LEAST} tokens or more.")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError("The model's tokenizer has no tokenizer.json.", "Use a model with a fast tokenizer.")
    top = None if most is None else most - frame_tokens(tokenizer) - ROOM
    workers = min(len(os.sched_getaffinity(0)), len(tasks), 8)
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(workers) as pool:
        path = Path(scratch) / "tokenizer.json"
        backend.save(str(path))
        shared = {"lengths": list(lengths), "samples": samples, "seed": seed, "most": top, "tokenizer": str(path)}
        jobs = [{**shared, "task": task} for task in tasks]
        made = []
        for job, found in zip(jobs, pool.map(lambda job: _run(job, seconds), jobs), strict=True):
            made.append([prompt for part in found for prompt in _prompts(job, part)])
            done(str(job["task"]))
    return [prompt for part in made for prompt in part]


def frame_tokens(tokenizer: Any) -> int:
    """Tokens of the chat template around an empty message."""
    if not getattr(tokenizer, "chat_template", None):
        return 0
    text = tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True, tokenize=False)
    return len(tokenise(tokenizer, [text])[0])


def _run(job: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "coattn_lab.evaluate.tasks.ruler_child", json.dumps(job)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds * len(job["lengths"]))
    except subprocess.TimeoutExpired:
        raise InputError(
            f"RULER's generator of {job['task']} did not end at lengths {job['lengths']}.",
            "It tries for ever where its shortest prompt is too long: give longer lengths.",
        ) from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InputError(
            f"RULER's generator of {job['task']} failed: {last[:240].rstrip('.')}.",
            "Give other lengths, or install the extra again: pip install 'coattn[eval]'.",
        )
    return [json.loads(line) for line in ended.stdout.splitlines()]


def _prompts(job: dict[str, Any], part: dict[str, Any]) -> list[Prompt]:
    found = []
    for row in part["rows"]:
        context, question, prefix = cut(row["input"], part["template"], part["prefix"])
        outputs = row["outputs"] if isinstance(row["outputs"], list) else [row["outputs"]]
        found.append(
            Prompt(
                f"ruler/{part['length']}/{job['task']}/{job['seed']}/{row['index']}",
                "ruler",
                job["task"],
                part["length"],
                context,
                question,
                prefix,
                tuple(dict.fromkeys(str(each) for each in outputs)),
                "part" if job["task"].startswith("qa") else "all",
                part["new_tokens"],
            )
        )
    return found


def cut(text: str, template: str, prefix: str) -> tuple[str, str, str]:
    """A generated prompt -> context, question, beginning of the answer: at the last places where these begin."""
    behind = template.split("{context}")[1]
    answer = text.rfind(prefix.split("{")[0].rstrip())
    question = text.rfind(behind.split("{")[0][:MARK], 0, answer)
    if answer < 0 or question <= 0:
        raise InputError("A prompt of RULER does not end with its question.", "Is another version of it installed?")
    return text[:question], text[question:answer], text[answer:]
