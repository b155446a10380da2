"""Speed of a model under methods, through the engine that serves it: real weights, real text, what a user waits for."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from coattn.engine.llm import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import CoattnError
from coattn.hf.families import check_length
from coattn.hf.load import Loaded
from coattn.hf.sketches import with_sketches
from coattn.kernels.prompt.warm import warm
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.text import Text
from coattn.tools.evaluate.fidelity import kl_divergence
from coattn.tools.evaluate.steps import Steps

Row = dict[str, Any]
"""A method, its parameters and its figures, or why it cannot run here (`refused`). Times are in seconds."""
Answers = TypeVar("Answers")
CHUNK = 2048
"""Prompt tokens read in a step."""


@dataclass(frozen=True)
class Candidate:
    """A method with its parameters and the KV memory that it may use."""

    method: str
    params: dict[str, Any] = field(default_factory=dict)
    gpu_kv: str | None = None
    host_kv: str | None = None


def prompts(loaded: Loaded, text: Text, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of different stretches of a text, one for each length; a text that is too short begins again."""
    check_length("A prompt's length", max(lengths), loaded.name, loaded.positions)
    body = text.body[: sum(lengths) * 16]
    ids = [int(i) for i in loaded.tokenizer(body, verbose=False)["input_ids"]]
    made, start = [], 0
    for length in lengths:
        whole = ids[start:] + ids * (length // len(ids) + 1)
        made.append(whole[:length])
        start = (start + length) % len(ids)
    return made


def rows(
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], tuple[Row, Answers]],
    compare: Callable[[Answers, Answers], Row],
) -> Iterator[Row]:
    """A row of each candidate, its answers compared with those of the first one that runs."""
    reference = None
    for candidate in candidates:
        try:
            row, answers = run(candidate)
        except (CoattnError, torch.OutOfMemoryError) as error:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            yield {"method": candidate.method, "refused": " ".join(str(error).split())[:200]}
            continue
        reference = answers if reference is None else reference
        yield row | compare(answers, reference)


def decode(loaded: Loaded, candidate: Candidate, windows: Tensor, new_tokens: int) -> tuple[Row, Tensor]:
    """Windows `[sequences, tokens]` of text: all but the last tokens as prompts, then those one decode step each, as
    the text has them -> also the predictions `[steps, sequences, vocabulary]`.

    `prompt_s` is the time to read the prompts one after another; `step_s` the median of the decode steps, each of which
    makes a token of every sequence.
    """
    count, length = windows.shape
    composed = with_sketches(compose(find_method(candidate.method), **candidate.params), loaded)
    first, times, kept = length - new_tokens, list[float](), list[Tensor]()
    with (
        Steps(
            loaded.model, windows, composed.method, candidate.gpu_kv, candidate.host_kv, {**composed.params}
        ) as steps,
        torch.inference_mode(),
    ):
        warm(steps.session.layers, first)
        steps.runner.warm_up([count])
        start = time.perf_counter()
        steps.read(first, CHUNK)
        _synchronise(loaded)
        prompt_s = time.perf_counter() - start
        for at in range(first, length):
            start = time.perf_counter()
            logits = steps.decode(at)
            _synchronise(loaded)
            times.append(time.perf_counter() - start)
            kept.append(logits.float().cpu())
        held = dict(steps.ledger.held)
    row = {
        **steps.composed.describe(),
        "prompt_s": prompt_s,
        "step_s": statistics.median(times),
        "step_p99_s": _p99(times),
        "tokens_per_s": count / statistics.median(times),
        "gpu_kv": held["gpu"],
        "host_kv": held["host"],
    }
    return row, torch.stack(kept)


def compare_predictions(own: Tensor, reference: Tensor) -> Row:
    """kl: divergence from the reference, the mean over the steps; top1: how often the likeliest token is the same."""
    return {
        "kl": kl_divergence(reference.flatten(0, 1), own.flatten(0, 1)).mean().item(),
        "top1": (reference.argmax(-1) == own.argmax(-1)).double().mean().item(),
    }


def serve(
    loaded: Loaded,
    candidate: Candidate,
    prompts: list[list[int]],
    new_tokens: int,
    max_batch: int,
    weights_on_gpu: float | None,
) -> tuple[Row, list[tuple[int, ...]]]:
    """Prompts that arrive at the same time, through an engine -> also the answers.

    `total_s` is the time to the end of the last answer; `first_token_s` the median over the requests, waiting included;
    `between_s` likewise the mean time between two tokens of an answer.
    """
    with LLM(
        loaded,
        candidate.method,
        gpu_kv=candidate.gpu_kv,
        host_kv=candidate.host_kv,
        weights_on_gpu=weights_on_gpu,
        max_batch=max_batch,
        max_length=max(map(len, prompts)) + new_tokens,
        **candidate.params,
    ) as llm:
        llm.warm_up()
        start = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
        total_s = time.perf_counter() - start
        said, described = llm.report(), llm.composed.describe()
    for output in outputs:
        if output.error is not None:
            raise output.error
    first = [output.first_token_s or 0.0 for output in outputs]
    between = [1 / (output.tokens_per_s or math.inf) for output in outputs]
    row = {
        **described,
        "exact": said["exact"],
        "total_s": total_s,
        "tokens_per_s": sum(output.new_tokens for output in outputs) / total_s,
        "first_token_s": statistics.median(first),
        "first_token_p99_s": _p99(first),
        "between_s": statistics.median(between),
        "between_p99_s": _p99(between),
        "gpu_kv": said["gpu_kv_peak"],
        "host_kv": said["host_kv_peak"],
    }
    return row, [output.token_ids for output in outputs]


def compare_answers(own: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> Row:
    """same: the mean share of an answer's tokens before it parts from the reference's of the same length."""
    shares = []
    for answer, other in zip(own, reference, strict=True):
        parted = (i for i, pair in enumerate(zip(answer, other, strict=True)) if pair[0] != pair[1])
        shares.append(next(parted, len(answer)) / len(answer))
    return {"same": statistics.fmean(shares)}


def _synchronise(loaded: Loaded) -> None:
    if loaded.model.device.type == "cuda":
        torch.cuda.synchronize(loaded.model.device)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
