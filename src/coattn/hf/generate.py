"""One prompt, one answer, under a method: what `coattn generate` and `coattn demo` run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from coattn.errors import InputError
from coattn.hf.attach import attach
from coattn.hf.load import Loaded
from coattn.hf.quiet import quiet
from coattn.method import Method


@dataclass(frozen=True)
class Generation:
    """An answer and what it took."""

    text: str
    prompt_ids: Tensor
    """`[tokens]`"""
    new_ids: Tensor
    """`[tokens]`, the end token included if there was one."""
    prefill_s: float
    """Until the first token."""
    decode_s: float
    """From the first token to the last."""
    report: dict[str, Any]

    @property
    def tokens_per_s(self) -> float | None:
        """Decode steps per second; None when there was only one token."""
        steps = len(self.new_ids) - 1
        return steps / self.decode_s if steps > 0 and self.decode_s > 0 else None


@dataclass
class _Clock(TextStreamer):  # type: ignore[misc]
    """Notes when tokens arrive, and hands text on as soon as it is final."""

    tokenizer: Any
    on_text: Callable[[str], None] | None
    marks: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.tokenizer, skip_prompt=True, skip_special_tokens=True)

    def put(self, value: Tensor) -> None:
        self.marks.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.on_text is not None:
            self.on_text(text)


def encode_prompt(loaded: Loaded, prompt: str, raw: bool = False) -> Tensor:
    """Prompt -> ids `[tokens]`, through the chat template where the tokenizer has one and `raw` is not asked for."""
    tokenizer = loaded.tokenizer
    if raw or not getattr(tokenizer, "chat_template", None):
        ids = tokenizer(prompt, return_tensors="pt", verbose=False).input_ids
    else:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids
    return torch.as_tensor(ids[0])


def positions(loaded: Loaded) -> int | None:
    """The longest sequence the model was made for."""
    found = getattr(loaded.model.config, "max_position_embeddings", None)
    return int(found) if found else None


def room(loaded: Loaded, tokens: int, what: str = "The prompt") -> int | None:
    """Positions left after `tokens`; None when the model has no limit. Raises InputError when there are none."""
    limit = positions(loaded)
    if limit is None:
        return None
    if tokens >= limit:
        raise InputError(
            f"{what} has {tokens:,} tokens, but {loaded.name} has only {limit:,} positions.",
            "Shorten it, or use a model with a longer context.",
        )
    return limit - tokens


def generate(
    loaded: Loaded,
    ids: Tensor,
    method: str | Method,
    *,
    max_new_tokens: int,
    gpu_kv: int | str | None = None,
    host_kv: int | str | None = None,
    params: dict[str, Any] | None = None,
    on_text: Callable[[str], None] | None = None,
    **sampling: Any,
) -> Generation:
    """Continues ids `[tokens]` under a method. on_text gets pieces of the answer as they become final."""
    left = room(loaded, len(ids))
    count = max_new_tokens if left is None else min(max_new_tokens, left)
    model, tokenizer = loaded.model, loaded.tokenizer
    clock = _Clock(tokenizer, on_text)
    batch = ids[None].to(model.get_input_embeddings().weight.device)
    with attach(model, method, gpu_kv=gpu_kv, host_kv=host_kv, **(params or {})) as attachment, quiet():
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=count,
            streamer=clock,
            pad_token_id=tokenizer.pad_token_id,
            **sampling,
        )
        report = attachment.report()
    new = out[0, len(ids) :].cpu()
    start, first, last = clock.marks[0], clock.marks[1], clock.marks[-1]
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Generation(text, ids, new, first - start, last - first, report)
