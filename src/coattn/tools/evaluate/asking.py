"""Many prompts through one engine: answers as they finish, and how much has been read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coattn.engine.llm import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import ConfigError, InputError
from coattn.hf.architectures import describe_layers
from coattn.hf.generate import positions
from coattn.hf.load import Loaded
from coattn.method.row import Method

Progress = Callable[[int], None]
"""Gets how many tokens of prompts were read since the last call."""


@dataclass(frozen=True)
class Ask:
    """A prompt as token ids, and how it is continued."""

    name: str
    ids: list[int]
    params: SamplingParams

    @property
    def length(self) -> int:
        """Tokens, prompt and longest answer."""
        return len(self.ids) + self.params.max_new_tokens


def digest(asks: Sequence[Ask]) -> str:
    """SHA-256 of every prompt, token by token: wording, tokenizer and template included."""
    lines = (f"{ask.name} {ask.params.max_new_tokens} {ask.ids}\n" for ask in asks)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


COUNTS = ("prefill_tokens", "decode_steps")


@dataclass
class Asker:
    """A model under a method, and the memory it may use.

    gpu_share: instead of gpu_kv, GPU memory as a share of the KV of each prompt. by_length: what depends on the
    longest sequence of an engine shall depend on the prompt's own length. With either, prompts of different lengths run
    in engines of their own; else all share one.
    """

    loaded: Loaded
    method: Method
    params: dict[str, Any] = field(default_factory=dict)
    gpu_kv: str | int | None = None
    host_kv: str | int | None = None
    gpu_share: float | None = None
    by_length: bool = False
    batch: int = 8
    chunk: int | None = None
    """Tokens read per step. None: whole prompts, so that prefill is dense and exact under every method."""
    peak: dict[str, int] = field(default_factory=lambda: {"gpu_kv_peak": 0, "host_kv_peak": 0})
    """The most KV bytes per tier so far."""
    read_share: dict[int, float] = field(default_factory=dict)
    """By tokens of a prompt: bytes of KV that a decode step read, of what full attention reads. Of the last step in
    which no prompt finished; only where an engine has prompts of one length."""

    def __post_init__(self) -> None:
        if self.gpu_share is None:
            return
        if self.gpu_kv is not None:
            raise ConfigError("Both gpu_kv and gpu_share are given.", "Leave one out.")
        if not 0 < self.gpu_share <= 1:
            raise ConfigError(
                f"gpu_share is {self.gpu_share}, but must be above 0 and at most 1.", "Give 0.125 for an eighth."
            )

    def check(self, asks: Sequence[Ask]) -> None:
        """Raises InputError when one of them does not fit in the model."""
        long = max(asks, key=lambda ask: ask.length, default=None)
        if long is not None:
            self.check_length(len(long.ids), long.params.max_new_tokens)

    def check_length(self, prompt: int, answer: int) -> None:
        """Raises InputError when a prompt of so many tokens and its answer do not fit in the model."""
        limit = positions(self.loaded)
        if limit is not None and prompt + answer > limit:
            raise InputError(
                f"A prompt of {prompt:,} tokens and an answer of {answer:,} need {prompt + answer:,} positions, "
                f"but {self.loaded.name} has {limit:,}.",
                f"Give at most {limit - answer:,} tokens.",
            )

    def run(self, asks: Sequence[Ask], progress: Progress | None = None) -> Iterator[tuple[Ask, str]]:
        """`(ask, answer)` in the order in which they finish."""
        self.check(asks)
        for group in self._groups(asks):
            most, batch = max(ask.length for ask in group), min(self.batch, len(group))
            with self._open(most, batch) as llm:
                yield from answers(llm, group, progress, partial(self._look, llm, len(group[0].ids)))
                report = llm.report()
            self.peak = {name: max(value, int(report[name])) for name, value in self.peak.items()}

    def _look(self, llm: LLM, tokens: int) -> None:
        step = llm.trace() if self.gpu_share is not None or self.by_length else None
        if step is not None:
            whole = step.sequences * tokens * sum(layer.token_bytes for layer in describe_layers(llm.model))
            read = step.hbm_bytes - step.weight_bytes + step.dram_bytes
            self.read_share[tokens] = min(1.0, read / whole)

    def _open(self, most: int, batch: int) -> LLM:
        return LLM(
            self.loaded,
            self.method,
            gpu_kv=self._budget(most * batch),
            host_kv=self.host_kv,
            max_batch=batch,
            max_length=most,
            chunk=self.chunk or most,
            **self.params,
        )

    def _groups(self, asks: Sequence[Ask]) -> list[list[Ask]]:
        if self.gpu_share is None and not self.by_length:
            return [list(asks)] if asks else []
        lengths = sorted({ask.length for ask in asks})
        return [[ask for ask in asks if ask.length == length] for length in lengths]

    def _budget(self, tokens: int) -> str | int | None:
        if self.gpu_share is None:
            return self.gpu_kv
        return int(self.gpu_share * tokens * sum(layer.token_bytes for layer in describe_layers(self.loaded.model)))


def answers(
    llm: LLM, asks: Sequence[Ask], progress: Progress | None = None, look: Callable[[], None] | None = None
) -> Iterator[tuple[Ask, str]]:
    """`(ask, answer)` in the order in which they finish. Leaving the loop early cancels the rest.

    look: called after decode steps in which no prompt finished.
    A request that fails raises its error: a benchmark with holes would look like a worse method.
    """
    handles = [(ask, llm.submit(ask.ids, ask.params)) for ask in asks]
    read, steps = (int(llm.report()[name]) for name in COUNTS)
    try:
        while handles:
            llm.step()
            now, decoded = (int(llm.report()[name]) for name in COUNTS)
            if progress is not None and now > read:
                progress(now - read)
            done = [pair for pair in handles if pair[1].done]
            if look is not None and decoded > steps and not done:
                look()
            read, steps = now, decoded
            handles = [pair for pair in handles if not pair[1].done]
            for ask, handle in done:
                output = handle.output()
                if output.error is not None:
                    raise output.error
                yield ask, output.text
    finally:
        for _, handle in handles:
            handle.cancel()
