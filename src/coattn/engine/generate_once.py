"""One prompt, one answer, under a method: what `coattn generate` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coattn.engine.chunk_policy import GPU_CHUNK_TOKENS
from coattn.engine.llm import LLM
from coattn.engine.sampling.params import DEFAULT_NEW_TOKENS, SamplingParams
from coattn.engine.watch import stream
from coattn.hf.families import check_length
from coattn.hf.generate import positions, room
from coattn.hf.load import Loaded
from coattn.method.row import Method


@dataclass(frozen=True)
class Generation:
    """An answer and what it took."""

    text: str
    new_ids: tuple[int, ...]
    """The end token is included if there was one."""
    prefill_s: float
    """Until the first token."""
    decode_s: float
    """From the first token to the last."""
    report: dict[str, Any]
    finish_reason: str
    """stop: the end token; length: as many tokens as were asked for, or as the model has positions."""

    @property
    def tokens_per_s(self) -> float | None:
        """Decode steps per second; None when there was only one token."""
        steps = len(self.new_ids) - 1
        return steps / self.decode_s if steps > 0 and self.decode_s > 0 else None


def generate(
    loaded: Loaded,
    ids: Sequence[int],
    method: str | Method | None,
    *,
    sampling: SamplingParams,
    on_text: Callable[[str], None] | None = None,
    weights_on_gpu: float | None = None,
    devices: Sequence[str] | None = None,
    **options: Any,
) -> Generation:
    """Continues the token ids under a method. on_text gets pieces of the answer as they become final.

    options: others of `LLM`, and the method's parameters.
    """
    left = room(loaded.name, positions(loaded), len(ids))
    check_length("max_new_tokens", sampling.max_new_tokens, loaded.name, positions(loaded))
    new = sampling.max_new_tokens or DEFAULT_NEW_TOKENS
    count = new if left is None else min(new, left)
    on_gpu = loaded.model.device.type == "cuda" or weights_on_gpu is not None or (devices or [""])[0][:4] == "cuda"
    chunk = GPU_CHUNK_TOKENS if on_gpu else len(ids)  # without a GPU the prompt is read at once
    with LLM(
        loaded,
        method,
        max_batch=1,
        max_length=len(ids) + count,
        chunk=chunk,
        weights_on_gpu=weights_on_gpu,
        devices=devices,
        **options,
    ) as engine:
        handle = engine.submit(ids, sampling)
        for part in stream(engine.engine, handle, engine.progress):
            if on_text is not None and part.text:
                on_text(part.text)
        answer, report = handle.output(), engine.report()
    if answer.error is not None:
        raise answer.error
    first, total = answer.first_token_s or 0.0, answer.total_s or 0.0
    return Generation(answer.text, answer.token_ids, first, total - first, report, str(answer.finish_reason))
