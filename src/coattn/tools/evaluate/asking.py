"""Many prompts through engines: answers as they finish, and how much a decode step reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from coattn.engine.llm import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import InputError
from coattn.hf.architectures import describe_layers
from coattn.hf.generate import positions
from coattn.hf.load import Loaded
from coattn.method.row import Composed

Progress = Callable[[int], None]
"""Gets how many tokens of prompts were read since the last call."""


class Answer(NamedTuple):
    """read_share: bytes of KV that a decode step read, of what full attention reads; None where all steps ended some
    prompt's answer."""

    name: str
    text: str
    read_share: float | None


@dataclass
class Asker:
    """A model under a method, and the memory it may use.

    Prompts of one length share an engine: what depends on the longest sequence depends on the prompt's own length.
    gpu_share: instead of gpu_kv, GPU memory as a share of the KV of each prompt.
    """

    loaded: Loaded
    composed: Composed
    gpu_kv: str | None
    host_kv: str | None
    gpu_share: float | None
    batch: int
    chunk: int | None
    """Tokens read per step. None: whole prompts, so that prefill is dense and exact under every method."""
    peak: dict[str, int] = field(default_factory=lambda: {"gpu_kv_peak": 0, "host_kv_peak": 0})
    """The most KV bytes per tier so far."""

    def __post_init__(self) -> None:
        self._token_bytes = sum(layer.token_bytes for layer in describe_layers(self.loaded.model))

    def check_length(self, prompt: int, answer: int) -> None:
        """Raises InputError when a prompt of so many tokens and its answer do not fit in the model."""
        limit = positions(self.loaded)
        if limit is not None and prompt + answer > limit:
            raise InputError(
                f"A prompt of {prompt:,} tokens and an answer of {answer:,} need {prompt + answer:,} positions, "
                f"but {self.loaded.name} has {limit:,}.",
                f"Give at most {limit - answer:,} tokens.",
            )

    def run(self, prompts: Mapping[str, list[int]], new_tokens: int, progress: Progress) -> Iterator[Answer]:
        """Answers to prompts of token ids, by name, in the order in which they finish."""
        for length in sorted({len(ids) for ids in prompts.values()}):
            group = {name: ids for name, ids in prompts.items() if len(ids) == length}
            most, batch = length + new_tokens, min(self.batch, len(group))
            share = self.gpu_share
            gpu_kv = self.gpu_kv if share is None else int(share * most * batch * self._token_bytes)
            with LLM(
                self.loaded,
                self.composed.method,
                gpu_kv=gpu_kv,
                host_kv=self.host_kv,
                max_batch=batch,
                max_length=most,
                chunk=self.chunk or most,
                **self.composed.params,
            ) as llm:
                yield from self._answers(llm, group, length, new_tokens, progress)
                report = llm.report()
            self.peak = {name: max(value, int(report[name])) for name, value in self.peak.items()}

    def _answers(
        self, llm: LLM, group: Mapping[str, list[int]], length: int, new_tokens: int, progress: Progress
    ) -> Iterator[Answer]:
        """A request that fails raises its error: a benchmark with holes would look like a worse method."""
        params = SamplingParams(max_new_tokens=new_tokens)
        handles = {name: llm.submit(ids, params) for name, ids in group.items()}
        read, steps, share = 0, 0, None
        while handles:
            llm.step()
            report = llm.report()
            progress(report["prefill_tokens"] - read)
            done = [name for name, handle in handles.items() if handle.done]
            if report["decode_steps"] > steps and not done:
                share = self._read_share(llm, length)
            read, steps = report["prefill_tokens"], report["decode_steps"]
            for name in done:
                output = handles.pop(name).output()
                if output.error is not None:
                    raise output.error
                yield Answer(name, output.text, share)

    def _read_share(self, llm: LLM, tokens: int) -> float | None:
        """Of the last step, in which every sequence had about so many tokens."""
        step = llm.trace()
        if step is None:
            return None
        read = step.hbm_bytes - step.weight_bytes + step.dram_bytes
        return min(1.0, read / (step.sequences * tokens * self._token_bytes))
