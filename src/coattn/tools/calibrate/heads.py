"""Retrieval heads by needle mass: how much of its attention a head gives to what is asked for, far away in a prompt."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.errors import InputError
from coattn.hf.attach import attach
from coattn.kernels.softcap import softcap
from coattn.step.probe import Probe
from coattn.types import LayerShape, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]
ALPHABET = """alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec
romeo sierra tango uniform victor whiskey xray yankee zulu"""
WORDS = tuple(ALPHABET.split())
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
NEEDLE = "\nRemember this sequence of words, it is the {} pass key to the vault: {}.\n"
QUESTION = "\nWhat is the {} pass key to the vault? It is:{}.\n"


@dataclass(frozen=True)
class Prompt:
    """A text with pass keys in it, then questions and answers.

    asking: `[n]`, positions whose queries predict a token of an answer. wanted: `[n, 2]`, where the pass key that each
    asks for begins and ends.
    """

    ids: Tensor
    asking: Tensor
    wanted: Tensor


def make_prompt(tokenizer: Any, text: list[int], length: int, draws: random.Random) -> Prompt:
    """`length` tokens: up to ten pass keys at random depths, of up to 32 words of 26, as DuoAttention trains with."""
    words = max(2, min(32, length // 128))
    keys = [" ".join(draws.choices(WORDS, k=words)) for _ in ORDINALS]

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, verbose=False).input_ids)

    needles = [encode(NEEDLE.format(*pair)) for pair in zip(ORDINALS, keys, strict=True)]
    ends = []
    for name, key in zip(ORDINALS, keys, strict=True):
        parts = QUESTION.format(name, f"| {key}|").split("|")  # question, answer, end
        ends.append([encode(part) for part in parts])

    def room_beside(count: int) -> int:
        return length - sum(map(len, needles[:count])) - sum(len(part) for end in ends[:count] for part in end)

    count = next((n for n in range(len(needles), 0, -1) if room_beside(n) >= length // 3), 0)
    if not count:
        raise InputError(f"{length} tokens are too few for a pass key and a text.", "Give a larger --length.")
    needles, ends, room = needles[:count], ends[:count], room_beside(count)
    if room > len(text):
        raise InputError(f"The text has {len(text):,} tokens, but a prompt needs {room:,}.", "Give a longer text.")
    start = draws.randrange(len(text) - room + 1)
    hay = text[start : start + room]
    depths = sorted(draws.uniform(0.05, 0.95) for _ in needles)
    ids: list[int] = []
    spans, last = [], 0
    for depth, needle in zip(depths, needles, strict=True):
        ids += hay[last : int(depth * room)]
        last = int(depth * room)
        spans.append((len(ids), len(ids) + len(needle)))
        ids += needle
    ids += hay[last:]
    asking: list[int] = []
    wanted: list[tuple[int, int]] = []
    for (before, answer, after), span in zip(ends, spans, strict=True):
        ids += before
        asking += range(len(ids) - 1, len(ids) - 1 + len(answer))
        wanted += [span] * len(answer)
        ids += answer + after
    return Prompt(torch.tensor(ids), torch.tensor(asking), torch.tensor(wanted))


def needle_mass(
    q: Tensor, k: Tensor, prompt: Prompt, scale: float, cap: float | None, sinks: int, recent: int
) -> Tensor:
    """q `[n, q_heads, d]`, k `[n, kv_heads, d]` of a whole prompt -> `[kv_heads]` float32.

    Of each query head the weight on the pass key that is asked for, as far as it lies outside the first `sinks` and the
    last `recent` tokens, averaged over the answers' tokens; of a KV head's query heads the largest.
    """
    position = torch.arange(len(k), device=k.device)
    asking, wanted = prompt.asking.to(k.device), prompt.wanted.to(k.device)
    seen = position <= asking[:, None]
    far = (position >= sinks) & (position <= asking[:, None] - recent)
    own = far & (position >= wanted[:, :1]) & (position < wanted[:, 1:])
    grouped = q[asking].float().view(len(asking), k.shape[1], -1, k.shape[2])  # [asking, kv_heads, group, d]
    found = []
    for head in range(k.shape[1]):
        scores = softcap(torch.einsum("agd,nd->gan", grouped[:, head] * scale, k[:, head].float()), cap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        found.append((weights * own).sum(-1).mean(-1).amax())
    return torch.stack(found)


class Mass(Probe):
    """Adds up what the heads of every layer give to the pass keys of prompts, each read in one piece."""

    def __init__(self, layers: list[LayerShape], sinks: int, recent: int) -> None:
        self.layers, self.sinks, self.recent = layers, sinks, recent
        self.prompt: Prompt | None = None
        self.total = [torch.zeros(shape.kv_heads) for shape in layers]

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        assert self.prompt is not None, "a prompt is read"
        if self.layers[layer].sliding_window is None:
            cap = self.layers[layer].softcap
            self.total[layer] += needle_mass(q, k, self.prompt, scale, cap, self.sinks, self.recent).cpu()


@torch.inference_mode()
def score_heads(
    model: PreTrainedModel, prompts: list[Prompt], sinks: int, recent: int, progress: Progress | None = None
) -> list[list[float | None]]:
    """The mean needle mass of every layer and KV head; None of layers with a window. Cost: one prefill a prompt."""
    with attach(model, "full") as attachment:
        mass = Mass(list(attachment.layers), sinks, recent)
        attachment.probes.append(mass)
        for i, prompt in enumerate(prompts):
            mass.prompt = prompt
            cache = attachment.new_cache(len(prompt.ids))
            ids = prompt.ids[None].to(model.get_input_embeddings().weight.device)
            model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
            cache.conversation.close()
            if progress:
                progress("prompts read", i + 1, len(prompts))
    return [
        [None] * shape.kv_heads if shape.sliding_window is not None else (total / len(prompts)).tolist()
        for shape, total in zip(mass.layers, mass.total, strict=True)
    ]
