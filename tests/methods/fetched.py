"""A runtime over random tensors whose every query, key and value is known: for rows that choose single tokens."""

from collections.abc import Callable
from typing import Any

import torch
from tests.dense import dense
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.method.row import Method, compose
from coattn.parts.call import AttentionCall
from coattn.step.probe import Probe
from coattn.step.runtime import LayerGroup, Runtime
from coattn.types import LayerShape, Selection, Step

HEADS, KV_HEADS, DIM, SCALE, LAYERS = 6, 2, 16, 0.4, 3
GROUP = HEADS // KV_HEADS


class Seen(Probe):
    """Keeps what each layer of the last decode step selected."""

    def __init__(self) -> None:
        self.by_layer: dict[int, Selection] = {}

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Any) -> None:
        self.by_layer[call.layer] = selection


class World:
    """Three layers over several sequences."""

    def __init__(
        self, method: Method, seqs: int = 2, fixed: bool = False, softcap: float | None = None, **params: Any
    ) -> None:
        shape = LayerShape(HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"), softcap=softcap)
        self.probe, tokens = Seen(), 160 if fixed else None
        self.ledger = Ledger()
        composed = compose(method, **params)
        self.runtime = Runtime([shape] * LAYERS, composed, self.ledger, seqs, tokens, fixed, fixed, [self.probe])
        self.draws, self.softcap = torch.Generator().manual_seed(1), softcap
        self.lengths = [0] * seqs
        self.guessed: dict[int, Tensor] = {}
        self.kept = [
            [[torch.empty(0, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)] for _ in range(LAYERS)] for _ in "x" * seqs
        ]

    def step(self, *new: int, guess: Callable[[Tensor], Tensor] = lambda q: q, **planted: Tensor) -> list[Tensor]:
        """So many new tokens for each sequence. guess: predicts queries; planted: `q`, `k` or `v` of every layer."""
        step = Step.of(tuple(range(len(new))), tuple(self.lengths[: len(new)]), new)
        running = self.runtime.begin(step)
        drawn = [
            [
                planted.get(name, torch.randn(step.tokens, n, DIM, generator=self.draws))
                for name, n in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)
            ]
            for _ in range(LAYERS)
        ]
        self.guessed = {layer: made[0] for layer, made in enumerate(drawn)}
        found = []
        for layer, made in enumerate(drawn):
            for slot, (start, end) in enumerate(step.spans):
                self.kept[slot][layer] = [
                    torch.cat([a, b[start:end]]) for a, b in zip(self.kept[slot][layer], made, strict=True)
                ]
            following = layer + 1
            if following < LAYERS and self.runtime.predicts(running, following):
                self.guessed[following] = guess(drawn[following][0])
                self.runtime.predict(running, following, self.guessed[following], SCALE)
            found.append(self.runtime.attend(running, layer, *made, SCALE))
        self.runtime.commit(running)
        self.lengths[: len(new)] = step.lengths
        return found

    def take_back(self, slot: int, tokens: int) -> None:
        keep = self.lengths[slot] - tokens
        self.runtime.truncate(slot, self.lengths[slot], keep)
        self.lengths[slot] = keep
        self.kept[slot] = [[x[:keep] for x in layer] for layer in self.kept[slot]]

    def window(self, slot: int) -> int:
        """The first position that lies on the GPU."""
        cache = self.runtime.groups[0].cache
        return cache.gpu.first(self.lengths[slot]) * cache.block

    def picked(self, slot: int, layer: int) -> list[list[int]]:
        """By KV head: positions in DRAM that the last decode step attended to."""
        cache, listed = self.runtime.groups[0].cache, self.probe.by_layer[layer].host
        if listed is None:
            return [[]] * KV_HEADS
        block, owned = cache.block, cache.host.table.owned[slot]
        table, tokens = (x.expand(-1, KV_HEADS, *x.shape[2:])[slot] for x in (listed.table, listed.tokens))
        heads = []
        for head in range(KV_HEADS):
            ids = table[head].tolist()
            if listed.memory is None:
                count = int(tokens[head]) // block
                places = [owned.index(b) * block + r for b in ids[:count] for r in range(block)]
            else:
                each = [divmod(i, 2 * KV_HEADS * block) for i in ids[: int(tokens[head])]]
                places = [owned.index(b) * block + r for b, r in each]
            heads.append(sorted(places))
        return heads

    def positions(self, slot: int, layer: int) -> list[list[int]]:
        """By KV head: all that the last query attends to."""
        near = range(self.window(slot), self.lengths[slot])
        return [[*own, *near] for own in self.picked(slot, layer)]

    def attended(self, slot: int, layer: int) -> Tensor:
        """What the last query gets of these positions: `[q_heads, d]` float64."""
        q, k, v = self.kept[slot][layer]
        outs = []
        for head, some in enumerate(self.positions(slot, layer)):
            mine = q[-1:, GROUP * head : GROUP * (head + 1)]
            outs.append(dense(mine, k[some, head, None], v[some, head, None], SCALE, softcap=self.softcap)[0])
        return torch.cat(outs)
