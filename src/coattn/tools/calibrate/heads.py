"""Retrieval heads by needle mass: how much of its attention a head gives to what is asked for, far away in a prompt."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.baselines.duo.head_labels import HeadLabels, retrieval_heads
from coattn.errors import InputError
from coattn.hf.architectures import PreTrainedModel, describe_layers
from coattn.hf.converted import Progress, silent
from coattn.hf.load import Loaded
from coattn.kernels.sink_logits import softmax
from coattn.kernels.softcap import softcap
from coattn.step.probe import Probe
from coattn.step.runtime import Runtime
from coattn.text import Text
from coattn.tools.calibrate.reading import read, tokens_of
from coattn.types import LayerShape, Step

ALPHABET = """alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec
romeo sierra tango uniform victor whiskey xray yankee zulu"""
WORDS = tuple(ALPHABET.split())
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
NEEDLE = "\nRemember this sequence of words, it is the {} pass key to the vault: {}.\n"
QUESTION = "\nWhat is the {} pass key to the vault? It is:{}.\n"


class Prompt(NamedTuple):
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
    ends = [  # question, answer, end
        [encode(part) for part in QUESTION.format(name, f"| {key}|").split("|")]
        for name, key in zip(ORDINALS, keys, strict=True)
    ]

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
    q: Tensor,
    k: Tensor,
    prompt: Prompt,
    scale: float,
    cap: float | None,
    sinks: int,
    recent: int,
    logits: Tensor | None = None,
) -> Tensor:
    """q `[n, q_heads, d]`, k `[n, kv_heads, d]` of a whole prompt -> `[kv_heads]` float32.

    Of each query head the weight on the pass key that is asked for, as far as it lies outside the first `sinks` and the
    last `recent` tokens, averaged over the answers' tokens; of a KV head's query heads the largest. logits: the
    layer's `sink_logits`.
    """
    position = torch.arange(len(k), device=k.device)
    asking, wanted = prompt.asking.to(k.device), prompt.wanted.to(k.device)
    seen = position <= asking[:, None]
    far = (position >= sinks) & (position <= asking[:, None] - recent)
    own = far & (position >= wanted[:, :1]) & (position < wanted[:, 1:])
    grouped = q[asking].float().view(len(asking), k.shape[1], -1, k.shape[2])  # [asking, kv_heads, group, d]
    own_logits = [None] * k.shape[1] if logits is None else logits.view(k.shape[1], -1, 1)
    masses = []
    for head in range(k.shape[1]):
        scores = softcap(torch.einsum("agd,nd->gan", grouped[:, head] * scale, k[:, head].float()), cap)
        weights = softmax(scores.masked_fill(~seen, -torch.inf), own_logits[head])
        masses.append((weights * own).sum(-1).mean(-1).amax())
    return torch.stack(masses)


class Mass(Probe):
    """Adds up what the heads of every layer give to the pass keys of prompts, each read in one piece."""

    def __init__(self, layers: list[LayerShape], prompts: list[Prompt], sinks: int, recent: int) -> None:
        self.layers, self.sinks, self.recent = layers, sinks, recent
        self._next = iter(prompts)
        self.total = [torch.zeros(shape.kv_heads) for shape in layers]

    def open(self, runtime: Runtime) -> None:
        self.prompt = next(self._next)  # each prompt is read in a runtime of its own

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        if self.layers[layer].sliding_window is None:
            cap, logits = self.layers[layer].softcap, self.layers[layer].sink_logits
            self.total[layer] += needle_mass(q, k, self.prompt, scale, cap, self.sinks, self.recent, logits).cpu()


def score_heads(
    model: PreTrainedModel, prompts: list[Prompt], sinks: int, recent: int, progress: Progress = silent
) -> list[list[float | None]]:
    """The mean needle mass of every layer and KV head; None of layers with a window. Cost: one prefill a prompt."""
    mass = Mass(describe_layers(model), prompts, sinks, recent)
    read(model, [prompt.ids for prompt in prompts], mass, progress)
    return [
        [None] * shape.kv_heads if shape.sliding_window is not None else (total / len(prompts)).tolist()
        for shape, total in zip(mass.layers, mass.total, strict=True)
    ]


def write_heads(
    loaded: Loaded,
    text: Text,
    target: Path,
    *,
    rho: float | None = None,
    lengths: Sequence[int] = (),
    usual: Sequence[int] = (2048, 4096),
    samples: int = 4,
    sinks: int = 64,
    recent: int = 256,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Writes retrieval heads by needle mass -> what `coattn calibrate` says of them.

    rho: their share; by default 0.5, and 0.25 without grouped heads. lengths: of prompts; without them the usual ones,
    as far as the model has positions.
    """
    shapes, most = describe_layers(loaded.model), loaded.positions
    if most is not None and max(lengths, default=0) > most:
        asked = f"--length is {max(lengths):,}, but {loaded.name} has only {most:,} positions."
        raise InputError(asked, f"Give {most:,} or less.")
    sizes = sorted({min(length, most or length) for length in lengths or usual})
    rho = (0.5 if shapes[0].kv_heads < shapes[0].q_heads else 0.25) if rho is None else rho
    draws, ids = random.Random(seed), tokens_of(loaded, text).tolist()
    prompts = [make_prompt(loaded.tokenizer, ids, n, draws) for n in sizes for _ in range(samples)]
    scores = score_heads(loaded.model, prompts, sinks, recent, progress)
    labels = HeadLabels(
        loaded.name, [shape.mark for shape in shapes], sinks, recent, rho, scores, retrieval_heads(scores, rho),
        prompts=len(prompts), text=text.name,
    )  # fmt: skip
    labels.save(target)
    count = sum(map(sum, labels.retrieval))
    return {"heads": str(target), "model": loaded.name, "retrieval": count, "rho": rho, "scores": scores}
