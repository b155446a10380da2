"""How far a row's predictions are from full attention's, and how long its steps take: along full attention's answers.

The question is fed under the row, a token a step; then the tokens that full attention would say, whatever the row says.
Of a text, in which nothing is asked, they are the text's own.
So predictions stay comparable step by step, no prompt is read again, and the steps that are timed are those whose
predictions are compared: the row's own choices on a real text.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from coattn.engine.llm import LLM
from coattn.engine.runner.runner import Runner
from coattn.hf.load import Loaded
from coattn.tools.evaluate.fidelity import kl_divergence
from coattn.units import ceil_div
from coattn_lab.evaluate.tasks.reading import Held
from coattn_lab.evaluate.tasks.summary import interval

LOOK = 16
"""What a step reads is asked every so many steps."""
READ = ("gpu_tokens", "dram_tokens", "share")
Look = tuple[float, float, float]
"""What a step read of a sequence: tokens in GPU memory, tokens in DRAM, both as a share of all."""


@dataclass(frozen=True)
class Reference:
    """What full attention said. answers: by prompt, its greedy tokens, or the text's own. logits: `[prompts, steps,
    vocabulary]`."""

    held: tuple[Held, ...]
    answers: tuple[tuple[int, ...], ...]
    logits: Tensor

    @property
    def steps(self) -> int:
        return self.logits.shape[1]


def choose(held: Sequence[Held], steps: int, most: int, batch: int) -> tuple[Held, ...]:
    """All texts; else the first prompt of each task, then more until batches are full, if `most` has room for `steps`
    tokens behind them."""
    rounds: dict[str, list[Held]] = {}
    texts = tuple(each for each in held if each.ask.follows and len(_own(each, steps)) == steps)
    if texts:
        return texts
    for each in held:
        if not each.ask.follows and len(each.ask.ids) + steps <= most:
            rounds.setdefault(each.ask.prompt.task, []).append(each)
    order = [each for turn in zip_longest(*rounds.values()) for each in turn if each is not None]
    return tuple(order[: max(1, ceil_div(len(rounds), batch)) * batch])


@torch.no_grad()
def refer(loaded: Loaded, held: Sequence[Held], *, steps: int, batch: int, most: int) -> Reference:
    """Full attention's answers to some prompts, with its predictions. Cost: an engine, and the logits."""
    batch = min(batch, len(held))
    own = [_own(each, steps) for each in held] if all(each.ask.follows for each in held) else None
    with LLM(loaded, "full", max_batch=batch, max_length=most, sizes=(batch,), reuse=False) as llm:
        found = [[logits.clone() for logits in each] for each in _all(llm.runner, held, batch, own, steps, [], [])]
    answers = tuple(own or (tuple(int(logits.argmax()) for logits in each) for each in found))
    return Reference(tuple(held), answers, torch.stack([torch.stack(each) for each in found]))


@torch.no_grad()
def compare(runner: Runner, reference: Reference, batch: int) -> dict[str, Any]:
    """KL(full || row) in nats and agreement, over the answers; the interval is over prompts. Leaves the slots empty.

    `timed`: the steps in which all sequences of a batch took part, but for the first, which may capture. `read`: the
    tokens that such a step reads of a sequence in each tier, averaged over layers, heads and looks. `by_prompt`: KL and
    agreement of each.
    """
    batch, seconds, looks = min(batch, len(reference.held)), list[float](), list[Look]()
    own = _all(runner, reference.held, batch, reference.answers, reference.steps, seconds, looks)
    kls, same = [], []
    for logits, exact in zip(own, reference.logits, strict=True):
        mine = torch.stack(logits)
        kls.append(float(kl_divergence(exact, mine).mean()))
        same.append(float((mine.argmax(-1) == exact.argmax(-1)).double().mean()))
    spread = interval({"kl": kls})
    return {
        "kl": sum(kls) / len(kls),
        "kl_95": None if spread is None else list(spread),
        "top1": sum(same) / len(same),
        "prompts": len(kls),
        "steps": reference.steps,
        "timed": timed(seconds[1:], batch),
        "read": dict(zip(READ, map(statistics.fmean, zip(*looks, strict=True)), strict=False)),
        "by_prompt": {
            each.ask.prompt.name: {"kl": kl, "top1": top1}
            for each, kl, top1 in zip(reference.held, kls, same, strict=True)
        },
    }


def _own(held: Held, steps: int) -> tuple[int, ...]:
    """What stands in a text after the tokens that are fed."""
    at = held.ask.split + len(held.ask.question)
    return held.ask.ids[at : at + steps]


def timed(seconds: Sequence[float], batch: int) -> dict[str, Any] | None:
    """Milliseconds of a step: median and 99th percentile."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return {"ms": 1e3 * statistics.median(ordered), "p99_ms": 1e3 * p99, "steps": len(ordered), "batch": batch}


def _all(
    runner: Runner,
    held: Sequence[Held],
    batch: int,
    answers: Sequence[Sequence[int]] | None,
    steps: int,
    seconds: list[float],
    looks: list[Look],
) -> Iterator[list[Tensor]]:
    """Of each prompt its logits `[vocabulary]` at each of the steps, prompts `batch` at a time.

    seconds: takes how long each step of a whole batch was; looks: what some of them read of a sequence in each tier.
    """
    for start in range(0, len(held), batch):
        some = held[start : start + batch]
        own = None if answers is None else answers[start : start + batch]
        taken = (seconds, looks) if len(some) == batch else ([], [])
        yield from _batch(runner, some, own, steps, *taken)


def _batch(
    runner: Runner,
    held: Sequence[Held],
    answers: Sequence[Sequence[int]] | None,
    steps: int,
    seconds: list[float],
    looks: list[Look],
) -> list[list[Tensor]]:
    """Questions end together, so that the steps after them are of all prompts.

    A cache that drops tokens does so before a decode step, and has room for one prompt that is whole: each takes its
    first step before the next is stored.
    """
    stored = [0] * len(held)
    found: list[list[Tensor]] = [[] for _ in held]
    fed = [list(each.ask.question) for each in held]
    try:
        for slot, each in enumerate(held):
            runner.import_kv(slot, each.fed, 0, len(each.fed.tokens))
            stored[slot] = len(each.fed.tokens)
            if len(fed[slot]) > 1:
                runner.decode([slot], [fed[slot].pop(0)], [stored[slot]])
                stored[slot] += 1
        longest = max(map(len, fed))
        late = [longest - len(question) for question in fed]
        for at in range(longest + steps - 1):
            now = [slot for slot in range(len(held)) if at >= late[slot]]
            tokens = [fed[slot][at - late[slot]] for slot in now]
            started = time.perf_counter()
            logits = runner.decode(now, tokens, [stored[slot] for slot in now])
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
            if len(now) == len(held):
                seconds.append(time.perf_counter() - started)
                trace = runner.trace() if len(seconds) % LOOK == LOOK // 2 else None
                if trace is not None:
                    gpu, dram = trace.attended_gpu / len(held), trace.attended_host / len(held)
                    looks.append((gpu, dram, min(1.0, (gpu + dram) * len(held) / sum(stored))))
            for slot in now:
                stored[slot] += 1
            if at < longest - 1:
                continue
            for slot in now:
                row = logits[slot].float().clone()
                said = int(row.argmax()) if answers is None else answers[slot][len(found[slot])]
                found[slot].append(row)
                fed[slot].append(said)
    finally:
        for slot, length in enumerate(stored):
            if length:
                runner.runtime.truncate(slot, length, 0)
    return found
