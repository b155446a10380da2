"""What is stored is not read twice: second questions, turns, many questions about one text, and who is apart."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from coattn.bench.requests import spread
from coattn.engine.llm import LLM
from coattn.engine.params import SamplingParams
from coattn.errors import BudgetError, EngineError
from coattn.evaluate.session_rows import NO_GAPS
from coattn.hf.architectures import describe_layers

BATCHES = (16, 8, 4, 2, 1)
"""Of which the most that a cap allows is taken."""
MOVED = ("copied_bytes", "fetched_bytes", "sequences_moved", "prefix_evicted", "prefill_tokens")
"""Of reports: what a hit may have cost."""
FLIPS = 20_000
"""Random signs that a test of pairs draws."""
SLACK = 64 << 20
"""Bytes beside: memory is handed out in pieces of whole pages."""
QUIET = 32
"""Steps that are measured before the first turn and after each."""
SPARE = 1024
"""New tokens that sequences beside a turn may have."""


@dataclass(frozen=True)
class Setting:
    """A text of `tokens`, and what is asked about it."""

    tokens: int
    question: int = 32
    turn: int = 100
    new: int = 8
    rounds: int = 3
    questions: int = 16
    others: int = 4
    """Sequences that decode beside a turn."""
    other_tokens: int = 8192
    pairs: int = 50
    pair_tokens: int = 1024
    gpu_kv: int | None = None
    folder: str | None = None
    """Of the disk tier."""
    params: dict[str, Any] = field(default_factory=dict)


class Texts:
    """Random tokens, never the same twice."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self._draws = vocabulary, torch.Generator().manual_seed(0)

    def __call__(self, tokens: int) -> list[int]:
        return torch.randint(0, self.vocabulary, (tokens,), generator=self._draws).tolist()


def text_bytes(model: Any, tokens: int) -> int:
    """Keys and values of so many tokens."""
    return tokens * sum(shape.token_bytes for shape in describe_layers(model))


def mapped_bytes(model: Any, check: str, setting: Setting) -> int:
    """DRAM that a check's engines take for KV, at most."""
    tokens = {
        "again": 2 * _again_length(setting),
        "shared": _shared_tokens(setting),
        "beside": (setting.others + 1) * _beside_length(setting),
        "disk": 2 * (setting.tokens + setting.question + 64),
        "tenants": 2 * (setting.pair_tokens + 64),
    }
    return text_bytes(model, tokens[check]) + SLACK


def _again_length(setting: Setting) -> int:
    return setting.tokens + setting.question + (setting.turn + 8) * (setting.rounds + 1) + 64


def _shared_tokens(setting: Setting) -> int:
    one = setting.question + setting.new + 64
    return setting.tokens + (setting.questions + 1) * one


def _beside_length(setting: Setting) -> int:
    return max(setting.tokens + 4 * setting.turn, setting.other_tokens) + SPARE


def again(model: Any, method: str, setting: Setting) -> dict[str, Any]:
    """A second question about a text, and turns of a conversation about it, beside the first time it was read."""
    length = _again_length(setting)
    with LLM((model, None), method, max_batch=2, max_length=length, gpu_kv=setting.gpu_kv, **setting.params) as llm:
        texts = Texts(llm.vocabulary)
        llm.warm_up()
        _rehearse(llm, texts, setting)
        text = texts(setting.tokens)
        session = llm.session()
        first = session.ask(text + texts(setting.question), new(2))
        before = llm.report()
        asked = [llm.submit(text + texts(setting.question), new(2)).result() for _ in range(setting.rounds)]
        after = llm.report()
        turns = [session.ask(texts(setting.turn), new(2)) for _ in range(setting.rounds)]
        second = [out.first_token_s or 0.0 for out in asked]
        own = [out.first_token_s or 0.0 for out in turns]
        return {
            "first_s": first.first_token_s,
            "second_s": second,
            "second_ratio": statistics.median(second) / (first.first_token_s or 1.0),
            "cached_tokens": [out.cached_tokens for out in asked],
            "moved": {name: after[name] - before[name] for name in MOVED},
            "turn_s": own,
            "turn_median_s": statistics.median(own),
            "turn_cached_tokens": [out.cached_tokens for out in turns],
            "turn_total_s": [out.total_s for out in turns],
            **_kv(llm),
        }


def shared(model: Any, method: str, setting: Setting) -> dict[str, Any]:
    """Many questions about one text at once, beside texts of their own, one after the other."""
    longest = setting.tokens + setting.question + setting.new + 64
    with _largest(model, method, longest, text_bytes(model, _shared_tokens(setting)), setting) as llm:
        texts = Texts(llm.vocabulary)
        llm.warm_up()
        _rehearse(llm, texts, setting)
        text = texts(setting.tokens)
        prompts = [text + texts(setting.question) for _ in range(setting.questions)]
        begin = time.perf_counter()
        found = llm.generate(prompts, new(setting.new))
        taken = time.perf_counter() - begin
        held = _kv(llm)
        begin = time.perf_counter()
        own = llm.submit(texts(setting.tokens + setting.question), new(setting.new)).result()
        alone = time.perf_counter() - begin
        made = sum(out.new_tokens for out in found)
        return {
            "questions": setting.questions,
            "max_batch": llm.runner.runtime.groups[0].cache.spec.seqs,
            "failed": sum(out.error is not None for out in found),
            "total_s": taken,
            "tokens_per_s": made / taken,
            "cached_tokens": sorted(out.cached_tokens for out in found),
            "text_bytes": text_bytes(model, setting.tokens),
            "separate_s": alone,
            "separate_tokens_per_s": own.new_tokens / alone,
            "separate_bytes_at_once": text_bytes(model, setting.tokens) * setting.questions,
            **held,
        }


def beside(model: Any, method: str, setting: Setting) -> dict[str, Any]:
    """Steps of sequences that decode: alone, while a turn is read, and while what upkeep does of it goes on."""
    length, batch = _beside_length(setting), setting.others + 1
    with LLM((model, None), method, max_batch=batch, max_length=length, **setting.params) as llm:
        texts = Texts(llm.vocabulary)
        llm.warm_up()
        session = llm.session()
        session.ask(texts(setting.tokens), new(2))
        tokens = _decoding(llm, [texts(setting.other_tokens) for _ in range(setting.others)])
        while llm.runner.busy():  # what upkeep does of the others' own prompts
            llm.step()
        quiet, rows = _quiet(llm, tokens), []
        for _ in range(setting.rounds):  # sequences grow, so what is usual is measured before and after each turn
            rows.append(_turn_beside(llm, session, texts(setting.turn), tokens))
            quiet += _quiet(llm, tokens)
        found: dict[str, Any] = {f"between_{name}": value for name, value in spread(quiet).items()}
        for name in ("reading", "choosing"):
            found |= compare_gaps(name, [gap for row in rows for gap in row[name]], quiet, setting.others)
        return {**found, "choosing_s": [row["choosing_s"] for row in rows], **_kv(llm)}


def compare_gaps(name: str, gaps: list[float], quiet: list[float], others: int) -> dict[str, Any]:
    """Others' seconds from token to token while something goes on, beside quiet ones; `_note` where there are none."""
    found: dict[str, Any] = {f"{name}_{key}": value for key, value in spread(gaps).items()}
    known = bool(gaps and quiet)
    found[f"{name}_steps"] = len(gaps) // others
    found[f"{name}_ratio"] = statistics.mean(gaps) / statistics.mean(quiet) if known else None
    found[f"{name}_median_ratio"] = statistics.median(gaps) / statistics.median(quiet) if known else None
    found[f"{name}_p99_ratio"] = spread(gaps)["p99_s"] / spread(quiet)["p99_s"] if known else None  # type: ignore[operator]
    return found if known else found | {f"{name}_note": NO_GAPS}


def new(count: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def _decoding(llm: LLM, prompts: list[list[int]]) -> list[list[float]]:
    """Requests that decode from now on -> for each, the times of its tokens, which grows."""
    tokens: list[list[float]] = [[] for _ in prompts]

    def noter(own: list[float]) -> Callable[[], None]:
        return lambda: own.append(time.perf_counter())

    handles = [llm.submit(each, new(SPARE), notify=noter(own)) for each, own in zip(prompts, tokens, strict=True)]
    while not all(tokens):
        llm.step()
        ended = next((handle.request.error for handle in handles if handle.done), None)
        if ended is not None:
            raise EngineError(f"A sequence that should decode has ended: {ended}.")
    return tokens


def gaps_between(llm: LLM, tokens: list[list[float]], over: Callable[[], bool]) -> list[float]:
    """Seconds from token to token of every sequence, of tokens that come from now on until it is over."""
    first = [len(own) for own in tokens]
    while not over() and llm.step():
        pass
    return [b - a for own, n in zip(tokens, first, strict=True) for a, b in zip(own[n - 1 :], own[n:], strict=False)]


def _quiet(llm: LLM, tokens: list[list[float]]) -> list[float]:
    """Gaps of sequences that decode alone."""
    end = len(tokens[0]) + QUIET
    return gaps_between(llm, tokens, lambda: len(tokens[0]) >= end)


def _turn_beside(llm: LLM, session: Any, turn: list[int], tokens: list[list[float]]) -> dict[str, Any]:
    """Gaps of the others while a turn is read, and from its first token to its second."""
    own: list[float] = []
    handle = session.submit(turn, new(2), notify=lambda: own.append(time.perf_counter()))
    reading = gaps_between(llm, tokens, lambda: len(own) >= 1)
    choosing = gaps_between(llm, tokens, lambda: bool(handle.done))
    return {"reading": reading, "choosing": choosing, "choosing_s": own[-1] - own[0] if own else None}


def disk(model: Any, method: str, setting: Setting) -> dict[str, Any]:
    """A text that comes back from the disk, beside computing it and beside memory."""
    longest = setting.tokens + setting.question + 64
    room = text_bytes(model, longest) * 3 // 2
    options = {"host_kv": room, "disk": setting.folder, "disk_memory": "24GiB", **setting.params}
    with LLM((model, None), method, max_batch=1, max_length=longest, **options) as llm:
        texts = Texts(llm.vocabulary)
        llm.warm_up()
        _rehearse(llm, texts, setting)
        cold = llm.reuse.cold
        assert cold is not None
        asked, rows = [texts(setting.tokens) for _ in range(setting.rounds + 1)], []
        computed = [llm.submit(text, new(1)).result() for text in asked]
        memory = llm.submit(asked[-1], new(1)).result()
        for text, before in zip(asked[:-1], computed, strict=False):
            cold.disk.settle()
            found = llm.submit(text, new(1)).result()
            rows.append((found.first_token_s, found.cached_tokens, found.token_ids == before.token_ids))
        return {
            "text_bytes": text_bytes(model, setting.tokens),
            "computed_s": [out.first_token_s for out in computed],
            "memory_s": memory.first_token_s,
            "disk_s": [row[0] for row in rows],
            "disk_cached_tokens": [row[1] for row in rows],
            "same": all(row[2] for row in rows),
            "disk": llm.report()["disk"],
        }


def tenants(model: Any, method: str, setting: Setting) -> dict[str, Any]:
    """The same prompt under two salts, by pairs: whether the second is sooner."""
    longest = setting.pair_tokens + 64
    dice, rows = random.Random(0), []
    with LLM((model, None), method, max_batch=2, max_length=longest, **setting.params) as llm:
        texts = Texts(llm.vocabulary)
        llm.warm_up()
        for _ in range(setting.pairs + 2):  # the first two compile
            prompt = texts(setting.pair_tokens)
            outs = [llm.submit(prompt, new(1), salt=salt).result() for salt in (b"a", b"b", b"a")]
            rows.append([out.first_token_s or 0.0 for out in outs])
        rows = rows[2:]
        first, second, own = (statistics.median(column) for column in zip(*rows, strict=True))
        return {
            "pairs": len(rows),
            "first_s": first,
            "other_salt_s": second,
            "same_salt_s": own,
            "other_sooner_p": sooner([row[0] - row[1] for row in rows], dice),
            "same_sooner_p": sooner([row[0] - row[2] for row in rows], dice),
        }


def sooner(differences: list[float], dice: random.Random) -> float:
    """Chance of a sum as large as this one if every difference could as well have the other sign."""
    total = sum(differences)
    above = sum(sum(d if dice.random() < 0.5 else -d for d in differences) >= total for _ in range(FLIPS))
    return (above + 1) / (FLIPS + 1)


def _rehearse(llm: LLM, texts: Texts, setting: Setting) -> None:
    """What is compiled and chosen on the first prompt, hit and turn is not measured."""
    text = texts(max(2, setting.tokens // 4))
    with llm.session() as session:
        session.ask(text, new(2))
        session.ask(texts(setting.turn), new(2))
    llm.submit(text + texts(setting.question), new(2)).result()


def _largest(model: Any, method: str, longest: int, room: int, setting: Setting) -> LLM:
    """An engine for as many sequences at a time as the cap allows."""
    for batch in BATCHES:
        try:
            return LLM(
                (model, None),
                method,
                max_batch=batch,
                max_length=longest,
                gpu_kv=setting.gpu_kv,
                host_kv=room,
                sizes=[batch],
                **setting.params,
            )
        except BudgetError:
            if batch == BATCHES[-1]:
                raise
    raise AssertionError


def _kv(llm: LLM) -> dict[str, int]:
    return {f"{tier}_kv_peak": llm.ledger.peak[tier] for tier in llm.ledger.peak}


CHECKS: dict[str, Callable[[Any, str, Setting], dict[str, Any]]] = {
    "again": again,
    "shared": shared,
    "beside": beside,
    "disk": disk,
    "tenants": tenants,
}
