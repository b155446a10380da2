"""One prompt, one answer, under a method: what `coattn generate` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coattn.engine.chunk_policy import GPU_CHUNK_TOKENS
from coattn.engine.llm import LLM
from coattn.engine.request import RequestOutput
from coattn.engine.sampling.params import DEFAULT_NEW_TOKENS, SamplingParams
from coattn.engine.watch import stream
from coattn.hf.families import check_length, room
from coattn.hf.load import Loaded
from coattn.method.row import Method


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
) -> tuple[RequestOutput, dict[str, Any]]:
    """Continues the token ids under a method -> the answer, and the engine's report.

    on_text gets pieces of the answer as they become final.
    options: others of `LLM`, and the method's parameters.
    """
    left = room(loaded.name, loaded.positions, len(ids))
    check_length("max_new_tokens", sampling.max_new_tokens, loaded.name, loaded.positions)
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
    return answer, report
