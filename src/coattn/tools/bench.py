"""Speed of a model under methods, through the engine that serves it: real weights, real text, what a user waits for."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from coattn.engine.handle import Handle
from coattn.engine.llm import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import CoattnError, InputError
from coattn.hf.generate import positions
from coattn.hf.load import Loaded
from coattn.kernels.prompt.warm import warm
from coattn.text import Text
from coattn.tools.evaluate.fidelity import kl_divergence
from coattn.tools.evaluate.steps import Steps

Report = Callable[[int], None]
"""Gets the tokens of prompts and answers that are done since the last call."""


@dataclass(frozen=True)
class Request:
    """A prompt, when it arrives, and how many tokens its answer has."""

    ids: list[int]
    new_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A method with its parameters and the KV memory that it may use."""

    method: str
    params: dict[str, Any] = field(default_factory=dict)
    gpu_kv: str | int | None = None
    host_kv: str | int | None = None


@dataclass(frozen=True)
class Decoded:
    """One method over sequences that decode together. Times in seconds."""

    method: str
    exact: bool
    params: dict[str, Any]
    prompt_s: float
    """Reading the prompts, one after another."""
    step_s: float
    """Median of the decode steps; each makes a token of every sequence."""
    step_p99_s: float
    tokens_per_s: float
    gpu_kv: int
    host_kv: int
    captured: bool
    kl: float | None
    """KL divergence of its predictions from the first row's, the mean over the steps; None in the first row."""
    top1: float | None
    """How often its most likely token is the first row's."""


@dataclass
class Served:
    """One method over a stream of requests. Times in seconds."""

    method: str
    exact: bool
    params: dict[str, Any]
    total_s: float
    """From the first arrival to the end of the last answer."""
    tokens_per_s: float
    """Tokens of answers over `total_s`."""
    first_token_s: float
    """Median over the requests, from arrival."""
    first_token_p99_s: float
    between_s: float
    """Median time between two tokens of an answer."""
    between_p99_s: float
    gpu_kv: int
    host_kv: int
    captured: bool
    same: float | None
    """Share of the answers' tokens before they part from the first row's; None in the first row."""


@dataclass(frozen=True)
class Refused:
    """A method that cannot run here, and why."""

    method: str
    refused: str


def prompts(loaded: Loaded, text: Text, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of different stretches of a text, one for each length; a text that is too short begins again."""
    limit = positions(loaded)
    if limit is not None and max(lengths) > limit:
        raise InputError(
            f"A prompt of {max(lengths):,} tokens is longer than {loaded.name}'s {limit:,} positions.",
            f"Give {limit:,} tokens or less, answer included.",
        )
    body = text.body[: sum(lengths) * 16]
    ids = [int(i) for i in loaded.tokenizer(body, verbose=False)["input_ids"]]
    made, start = [], 0
    for length in lengths:
        whole = ids[start:] + ids * (length // len(ids) + 1)
        made.append(whole[:length])
        start = (start + length) % len(ids)
    return made


def arrivals(count: int, per_second: float | None, seed: int) -> list[float]:
    """Seconds at which requests arrive, by a Poisson process; None: all at once."""
    draws, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(now)
        now += draws.expovariate(per_second) if per_second else 0.0
    return found


def decode(
    loaded: Loaded,
    candidates: Sequence[Candidate],
    windows: Tensor,
    new_tokens: int,
    chunk: int,
    report: Report | None = None,
) -> Iterator[Decoded | Refused]:
    """Windows `[sequences, tokens]` of text under each candidate: all but the last tokens as prompts, then those one
    decode step each, as the text has them. The first row that runs is what the others' predictions are compared with.
    """
    reference: Tensor | None = None
    for candidate in candidates:
        try:
            row, logits = _decode(loaded, candidate, windows, new_tokens, chunk, reference, report)
        except (CoattnError, torch.OutOfMemoryError) as error:
            yield _refused(candidate, error)
            continue
        reference = logits if reference is None else reference
        yield row


def _decode(
    loaded: Loaded,
    candidate: Candidate,
    windows: Tensor,
    new_tokens: int,
    chunk: int,
    reference: Tensor | None,
    report: Report | None,
) -> tuple[Decoded, Tensor]:
    count, length = windows.shape
    first, taken, kept = length - new_tokens, list[float](), list[Tensor]()
    with (
        Steps(loaded.model, windows, candidate.method, candidate.gpu_kv, candidate.host_kv, candidate.params) as steps,
        torch.inference_mode(),
    ):
        warm(steps.session.layers, first)
        steps.runner.warm_up([count])
        start = time.perf_counter()
        steps.read(first, chunk)
        _synchronise(loaded)
        prompt_s = time.perf_counter() - start
        if report is not None:
            report(first * count)
        for at in range(first, length):
            start = time.perf_counter()
            logits = steps.decode(at)
            _synchronise(loaded)
            taken.append(time.perf_counter() - start)
            kept.append(logits.float().cpu())
            if report is not None:
                report(count)
        held, captured = dict(steps.ledger.held), steps.runtime.uncaptured() is None
    found = torch.stack(kept)
    median = statistics.median(taken)
    row = Decoded(
        method=candidate.method,
        exact=steps.composed.exact,
        params=dict(steps.composed.params),
        prompt_s=prompt_s,
        step_s=median,
        step_p99_s=_p99(taken),
        tokens_per_s=count / median,
        gpu_kv=held["gpu"],
        host_kv=held["host"],
        captured=captured,
        kl=None if reference is None else kl_divergence(reference.flatten(0, 1), found.flatten(0, 1)).mean().item(),
        top1=None if reference is None else (reference.argmax(-1) == found.argmax(-1)).double().mean().item(),
    )
    return row, found


def serve(
    loaded: Loaded,
    candidates: Sequence[Candidate],
    requests: Sequence[Request],
    max_batch: int,
    weights_on_gpu: float | None = None,
    report: Report | None = None,
) -> Iterator[Served | Refused]:
    """The same requests through an engine of each candidate. The first that runs is what `same` compares with."""
    reference: list[list[int]] | None = None
    for candidate in candidates:
        try:
            row, answers = _serve(loaded, candidate, requests, max_batch, weights_on_gpu, report)
        except (CoattnError, torch.OutOfMemoryError) as error:
            yield _refused(candidate, error)
            continue
        if reference is None:
            reference = answers
        else:
            row.same = statistics.fmean(map(same_share, answers, reference))
        yield row


def same_share(answer: Sequence[int], reference: Sequence[int]) -> float:
    """Share of an answer's tokens before it parts from another one of the same length."""
    pairs = enumerate(zip(answer, reference, strict=True))
    return next((i for i, (own, other) in pairs if own != other), len(answer)) / len(answer)


def _serve(
    loaded: Loaded,
    candidate: Candidate,
    requests: Sequence[Request],
    max_batch: int,
    weights_on_gpu: float | None,
    report: Report | None,
) -> tuple[Served, list[list[int]]]:
    with LLM(
        loaded,
        candidate.method,
        gpu_kv=candidate.gpu_kv,
        host_kv=candidate.host_kv,
        weights_on_gpu=weights_on_gpu,
        max_batch=max_batch,
        max_length=max(len(each.ids) + each.new_tokens for each in requests),
        **candidate.params,
    ) as llm:
        llm.warm_up()
        times: list[list[float]] = [[] for _ in requests]
        start, handles = _drive(llm, requests, times, report)
        end = time.perf_counter()
        said = llm.report()
    for handle in handles:
        if (error := handle.output().error) is not None:
            raise error
    first = [each[0] - start - request.arrival_s for each, request in zip(times, requests, strict=True)]
    gaps = [b - a for each in times for a, b in pairwise(each)]
    answers = [list(handle.output().token_ids) for handle in handles]
    row = Served(
        method=candidate.method,
        exact=said["exact"],
        params=dict(llm.composed.params),
        total_s=end - start,
        tokens_per_s=sum(map(len, answers)) / (end - start),
        first_token_s=statistics.median(first),
        first_token_p99_s=_p99(first),
        between_s=statistics.median(gaps),
        between_p99_s=_p99(gaps),
        gpu_kv=said["gpu_kv_peak"],
        host_kv=said["host_kv_peak"],
        captured=said["captured"],
        same=None,
    )
    return row, answers


def _refused(candidate: Candidate, error: Exception) -> Refused:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Refused(candidate.method, " ".join(str(error).split())[:200])


def _synchronise(loaded: Loaded) -> None:
    if loaded.model.device.type == "cuda":
        torch.cuda.synchronize(loaded.model.device)


def _drive(
    llm: LLM, requests: Sequence[Request], times: list[list[float]], report: Report | None
) -> tuple[float, list[Handle]]:
    """Submits requests as they arrive and steps until all are done -> when it began, and the handles.

    times: of each request, when each token of its answer came.
    """
    start, handles, done = time.perf_counter(), list[Handle](), 0
    while len(handles) < len(requests) or not all(handle.done for handle in handles):
        for request, noted in zip(requests[len(handles) :], times[len(handles) :], strict=True):
            if time.perf_counter() - start < request.arrival_s:
                break
            sampling = SamplingParams(max_new_tokens=request.new_tokens, ignore_eos=True)

            def note(noted: list[float] = noted) -> None:
                noted.append(time.perf_counter())

            handles.append(llm.submit(request.ids, sampling, notify=note))
        if not llm.step() and len(handles) < len(requests):
            time.sleep(max(0.0, requests[len(handles)].arrival_s - (time.perf_counter() - start)))
        if report is not None:
            said = llm.report()
            now = said["prefill_tokens"] + said["new_tokens"]
            report(now - done)
            done = now
    return start, handles


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
