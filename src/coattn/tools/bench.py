"""Speed of a model under methods, through the engine that serves it: real weights, real text, what a user waits for."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
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
Row = dict[str, Any]
"""A method, its parameters and its figures, or why it cannot run here (`refused`). Times are in seconds."""


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
    loaded: Loaded, candidates: Sequence[Candidate], windows: Tensor, new_tokens: int, chunk: int, report: Report
) -> Iterator[Row]:
    """Windows `[sequences, tokens]` of text under each candidate: all but the last tokens as prompts, then those one
    decode step each, as the text has them.

    `prompt_s` is the time to read the prompts one after another; `step_s` the median of the decode steps, each of which
    makes a token of every sequence. `kl`: KL divergence of the predictions from the first row's, the mean over the
    steps; `top1`: how often the most likely token is the first row's.
    """
    return _rows(candidates, partial(_decode, loaded, windows, new_tokens, chunk, report))


def serve(
    loaded: Loaded,
    candidates: Sequence[Candidate],
    requests: Sequence[Request],
    max_batch: int,
    weights_on_gpu: float | None,
    report: Report,
) -> Iterator[Row]:
    """The same requests through an engine of each candidate.

    `total_s` is from the first arrival to the end of the last answer; `first_token_s` the median over the requests,
    from arrival; `between_s` the median time between two tokens of an answer. `same`: share of the answers' tokens
    before they part from the first row's.
    """
    return _rows(candidates, partial(_serve, loaded, requests, max_batch, weights_on_gpu, report))


def _rows(candidates: Sequence[Candidate], run: Callable[[Candidate, Any], tuple[Row, Any]]) -> Iterator[Row]:
    """A row of each candidate. What the first one that runs has answered is what the others are compared with."""
    reference = None
    for candidate in candidates:
        try:
            row, answers = run(candidate, reference)
        except (CoattnError, torch.OutOfMemoryError) as error:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            yield {"method": candidate.method, "refused": " ".join(str(error).split())[:200]}
            continue
        reference = answers if reference is None else reference
        yield row


def _decode(
    loaded: Loaded,
    windows: Tensor,
    new_tokens: int,
    chunk: int,
    report: Report,
    candidate: Candidate,
    reference: Tensor | None,
) -> tuple[Row, Tensor]:
    count, length = windows.shape
    first, times, kept = length - new_tokens, list[float](), list[Tensor]()
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
        report(first * count)
        for at in range(first, length):
            start = time.perf_counter()
            logits = steps.decode(at)
            _synchronise(loaded)
            times.append(time.perf_counter() - start)
            kept.append(logits.float().cpu())
            report(count)
        held, captured = dict(steps.ledger.held), steps.runtime.uncaptured() is None
    predicted = torch.stack(kept)
    row = {
        **steps.composed.describe(),
        "prompt_s": prompt_s,
        "step_s": statistics.median(times),
        "step_p99_s": _p99(times),
        "tokens_per_s": count / statistics.median(times),
        "gpu_kv": held["gpu"],
        "host_kv": held["host"],
        "captured": captured,
        "kl": None,
        "top1": None,
    }
    if reference is not None:
        row["kl"] = kl_divergence(reference.flatten(0, 1), predicted.flatten(0, 1)).mean().item()
        row["top1"] = (reference.argmax(-1) == predicted.argmax(-1)).double().mean().item()
    return row, predicted


def _serve(
    loaded: Loaded,
    requests: Sequence[Request],
    max_batch: int,
    weights_on_gpu: float | None,
    report: Report,
    candidate: Candidate,
    reference: list[list[int]] | None,
) -> tuple[Row, list[list[int]]]:
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
        total_s = time.perf_counter() - start
        said, described = llm.report(), llm.composed.describe()
    outputs = [handle.output() for handle in handles]
    for output in outputs:
        if output.error is not None:
            raise output.error
    first = [each[0] - start - request.arrival_s for each, request in zip(times, requests, strict=True)]
    gaps = [b - a for each in times for a, b in pairwise(each)]
    answers = [list(output.token_ids) for output in outputs]
    row = {
        **described,
        "exact": said["exact"],
        "total_s": total_s,
        "tokens_per_s": sum(map(len, answers)) / total_s,
        "first_token_s": statistics.median(first),
        "first_token_p99_s": _p99(first),
        "between_s": statistics.median(gaps),
        "between_p99_s": _p99(gaps),
        "gpu_kv": said["gpu_kv_peak"],
        "host_kv": said["host_kv_peak"],
        "captured": said["captured"],
        "same": None if reference is None else statistics.fmean(map(same_share, answers, reference)),
    }
    return row, answers


def same_share(answer: Sequence[int], reference: Sequence[int]) -> float:
    """Share of an answer's tokens before it parts from another one of the same length."""
    pairs = enumerate(zip(answer, reference, strict=True))
    return next((i for i, (own, other) in pairs if own != other), len(answer)) / len(answer)


def _synchronise(loaded: Loaded) -> None:
    if loaded.model.device.type == "cuda":
        torch.cuda.synchronize(loaded.model.device)


def _drive(
    llm: LLM, requests: Sequence[Request], times: list[list[float]], report: Report
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
        said = llm.report()
        report(said["prefill_tokens"] + said["new_tokens"] - done)
        done = said["prefill_tokens"] + said["new_tokens"]
    return start, handles


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
