"""Reading a prompt: how long it takes under each method and cap, and that what comes out is the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.engine.runner import EagerRunner
from coattn.hf.forward import Session
from coattn.method import compose
from coattn.methods import find_method
from coattn.runtime import Runtime


@dataclass(frozen=True)
class Case:
    """One row to be; the first of a run is what the others are compared with."""

    method: str
    gpu_kv: int | None
    chunk: int
    """Tokens per step."""
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One measured prompt."""

    method: str
    tokens: int
    chunk: int
    gpu_kv: int | None
    seconds: float
    tokens_per_s: float
    ratio: float
    """Its time as a multiple of the first row's."""
    kl: float
    """Divergence of the next token's distribution from the first row's."""
    same_top: bool
    """Whether the most likely next token is the first row's."""
    gpu_kv_peak: int
    host_kv_peak: int


def run(model: Any, cases: list[Case], tokens: int) -> Iterator[Row]:
    """The same random prompt under each case."""
    ids = torch.randint(0, model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    first: tuple[float, Tensor] | None = None
    for case in cases:
        ledger = Ledger(case.gpu_kv, None)
        seconds, logits = _read(model, case, ledger, ids)
        first = first or (seconds, logits)
        own, plain = (x.double().log_softmax(-1) for x in (logits, first[1]))
        yield Row(
            case.method,
            tokens,
            case.chunk,
            case.gpu_kv,
            seconds,
            tokens / seconds,
            seconds / first[0],
            float((plain.exp() * (plain - own)).sum()),
            bool(own.argmax() == plain.argmax()),
            ledger.peak["gpu"],
            ledger.peak["host"],
        )


def _read(model: Any, case: Case, ledger: Ledger, ids: list[int]) -> tuple[float, Tensor]:
    chunk = case.chunk
    composed = compose(find_method(case.method), **case.params)
    with ExitStack() as undo:
        session = undo.enter_context(Session(model))
        runtime = Runtime(session.layers, composed, ledger, 1, len(ids) + 32, fixed=True)
        undo.callback(runtime.release)
        runner = EagerRunner(session, runtime, 1)
        # kernels are chosen and memory is taken on the first chunks: not what is measured
        for history in (0, chunk):
            runner.extend(0, ids[history : history + chunk], history, False)
        runner.forget(0, 2 * chunk)
        _synchronise(session.device)
        start = time.perf_counter()
        logits = None
        for history in range(0, len(ids), chunk):
            logits = runner.extend(0, ids[history : history + chunk], history, history + chunk >= len(ids))
        _synchronise(session.device)
        taken = time.perf_counter() - start
        assert logits is not None
        return taken, logits[0].float().cpu()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
