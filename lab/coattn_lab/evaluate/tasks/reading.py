"""Each prompt is read once, exactly; whoever answers it gets the same keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coattn.errors import InputError
from coattn.hf.architectures import describe_layers
from coattn.hf.load import Loaded
from coattn.hf.prefilled import Prefilled, prefill_ends
from coattn_lab.evaluate.tasks.prompts import Prompt, encode
from coattn_lab.evaluate.tasks.rules import TEXT

MODES = ("read", "fed")
"""`read`: the question is read with the prompt, as the papers do. `fed`: it is fed under the method, a token a step."""
CHUNK = 8192
HOLD_GPU, HOLD_HOST = 0.75, 4 << 30
"""KV of prompts that is held at a time: a share of the free GPU memory, or so many bytes without a GPU."""


@dataclass(frozen=True)
class Ask:
    """A prompt as tokens. ids: all of them; the first `split` are context, the others are the question."""

    prompt: Prompt
    ids: tuple[int, ...]
    split: int

    @property
    def length(self) -> int:
        """Tokens, longest answer included."""
        return len(self.ids) + self.prompt.new_tokens

    @property
    def follows(self) -> bool:
        """Whether rows are compared along the text itself."""
        return self.prompt.rule == TEXT

    @property
    def question(self) -> tuple[int, ...]:
        """What is fed before rows are compared; of a text its next two tokens."""
        return self.ids[self.split : self.split + 2] if self.follows else self.ids[self.split :]


@dataclass(frozen=True)
class Held:
    """A prompt that was read: after its question, and before it."""

    ask: Ask
    read: Prefilled
    fed: Prefilled


def encode_all(prompts: Sequence[Prompt], loaded: Loaded, chat: bool) -> list[Ask]:
    """Every prompt as tokens. Raises InputError where one and its answer do not fit in the model."""
    limit, found = loaded.positions, []
    for prompt in prompts:
        ids, split = encode(prompt, loaded.tokenizer, chat)
        if limit is not None and len(ids) + prompt.new_tokens > limit:
            raise InputError(
                f"The prompt {prompt.name} has {len(ids):,} tokens and an answer of {prompt.new_tokens}, but "
                f"{loaded.name} has {limit:,} positions.",
                "Make the prompts with this model, or run shorter ones with --lengths.",
            )
        found.append(Ask(prompt, tuple(ids), split))
    return found


def kv_bytes(model: Any, tokens: int) -> int:
    """Bytes of the keys and values of so many tokens, all layers."""
    return tokens * sum(layer.token_bytes for layer in describe_layers(model))


def waves(asks: Sequence[Ask], model: Any, hold: int | None) -> list[list[Ask]]:
    """Prompts of one length after the other, in parts whose KV fits in `hold` bytes. The shortest come first."""
    room = hold_bytes(model) if hold is None else hold
    found: list[list[Ask]] = []
    for length in sorted({ask.prompt.length for ask in asks}):
        here = [ask for ask in asks if ask.prompt.length == length]
        each = kv_bytes(model, max(len(ask.ids) for ask in here))
        count = max(1, room // each)
        parts = -(-len(here) // count)
        size = -(-len(here) // parts)  # of about the same size, so that none is nearly empty
        found += [here[i : i + size] for i in range(0, len(here), size)]
    return found


def hold_bytes(model: Any) -> int:
    """What is held when nobody says."""
    device = model.get_input_embeddings().weight.device
    return int(HOLD_GPU * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else HOLD_HOST


def read_all(asks: Sequence[Ask], loaded: Loaded, progress: Callable[[int], None] | None = None) -> Iterator[Held]:
    """Reads prompts one after the other; their KV stays where the model is. progress: tokens read."""
    device = loaded.model.get_input_embeddings().weight.device
    for ask in asks:
        chunk = CHUNK if device.type == "cuda" else len(ask.ids)
        read, fed = prefill_ends(loaded.model, list(ask.ids), (len(ask.ids), ask.split), chunk, device)
        if progress is not None:
            progress(len(ask.ids))
        yield Held(ask, read, fed)
