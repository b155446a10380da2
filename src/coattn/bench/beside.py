"""Sequences that decode while a long prompt is read: what each costs the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coattn.bench.requests import spread
from coattn.engine.handle import Handle
from coattn.engine.llm import LLM
from coattn.engine.params import SamplingParams
from coattn.errors import EngineError

STEPS = 64
"""Decode steps that are timed without a prompt."""
SPARE = 4096
"""New tokens that the sequences may have, at most, while the prompt is read."""


@dataclass(frozen=True)
class Setting:
    """batch sequences of `context` tokens decode; a prompt of `tokens` is read beside them."""

    batch: int
    context: int
    tokens: int
    options: dict[str, Any]
    """More of `coattn.LLM`: budgets, chunk, target_ms, parameters of the method."""


def run(model: Any, method: str, setting: Setting) -> dict[str, Any]:
    """One row. Raises CoattnError for a method that cannot run."""
    longest = max(setting.tokens, setting.context) + SPARE
    options = {"max_batch": setting.batch + 1, "sizes": [setting.batch], **setting.options}
    # the prompt is read again and again
    with LLM((model, None), method, max_length=longest, reuse=False, **options) as llm:
        draws = torch.Generator().manual_seed(0)

        def prompt(tokens: int) -> list[int]:
            return torch.randint(0, llm.vocabulary, (tokens,), generator=draws).tolist()

        llm.warm_up()
        long = prompt(setting.tokens)
        _first(llm, llm.submit(long[: max(2, setting.tokens // 4)], _new(1)))  # what is compiled on it is not measured
        alone = _first(llm, llm.submit(long, _new(1)))
        tokens: list[list[float]] = [[] for _ in range(setting.batch)]
        handles = _read(llm, [prompt(setting.context) for _ in tokens], tokens)
        rehearsed = llm.submit(prompt(max(2, setting.tokens // 16)), _new(1))
        _gaps(llm, tokens, lambda: rehearsed.done and len(tokens[0]) > 8)
        end = len(tokens[0]) + STEPS
        plain = _gaps(llm, tokens, lambda: len(tokens[0]) >= end)
        before = llm.report()
        begin = time.perf_counter()
        reading = llm.submit(long, _new(1))
        gaps = _gaps(llm, tokens, lambda: reading.done)
        taken = time.perf_counter() - begin
        after = llm.report()
        finished = sum(handle.done for handle in handles)
        for handle in handles:
            handle.cancel()
        quiet, beside = spread(plain), spread(gaps)
        assert quiet["median_s"] is not None
        p99 = beside["p99_s"]
        return {
            "method": method,
            "batch": setting.batch,
            "context": setting.context,
            "tokens": setting.tokens,
            **{f"between_{name}": value for name, value in quiet.items()},
            **{f"beside_{name}": value for name, value in beside.items()},
            "between_ratio": None if p99 is None else p99 / quiet["median_s"],
            "prompt_alone_s": alone,
            "prompt_beside_s": taken,
            "prompt_ratio": taken / alone,
            "steps": after["decode_steps"] - before["decode_steps"],
            "mixed_steps": after["mixed_steps"] - before["mixed_steps"],
            "between_steps": after["between_steps"] - before["between_steps"],
            "not_mixed": after["not_mixed"],
            "finished_early": finished,
            "error": None if reading.request.error is None else str(reading.request.error),
        }


def _new(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def _first(llm: LLM, handle: Handle) -> float:
    """Seconds until a request is done."""
    begin = time.perf_counter()
    while not handle.done:
        llm.step()
    return time.perf_counter() - begin


def _read(llm: LLM, prompts: list[list[int]], tokens: list[list[float]]) -> list[Handle]:
    """Requests that decode, all of them, and note the time of each token. Prompts are read in large chunks: nobody
    measures these steps."""

    def noter(own: list[float]) -> Callable[[], None]:
        return lambda: own.append(time.perf_counter())

    pace = llm.engine.pace
    fixed, pace.fixed = pace.fixed, pace.fixed or pace.most
    try:
        handles = [llm.submit(each, _new(SPARE), notify=noter(own)) for each, own in zip(prompts, tokens, strict=True)]
        while not all(handle.request.output for handle in handles):
            llm.step()
            for handle in handles:
                if handle.done:
                    raise EngineError(f"A sequence that should decode has ended: {handle.request.error}.")
    finally:
        pace.fixed = fixed
    return handles


def _gaps(llm: LLM, tokens: list[list[float]], over: Callable[[], bool]) -> list[float]:
    """Seconds from token to token of every sequence, from now on until it is over."""
    first = [len(own) for own in tokens]
    while not over():
        if not llm.step():
            break
    pairs = (zip(own[start:], own[start + 1 :], strict=False) for own, start in zip(tokens, first, strict=True))
    return [b - a for each in pairs for a, b in each]
