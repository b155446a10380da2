"""StreamingLLM with positions counted inside the cache, beside a slow re-statement that numbers every token anew."""

import pytest
import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Rope, Step

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 16, 0.4
GROUP = HEADS // KV_HEADS
FREQUENCIES = tuple(1.7 * 0.6**i for i in range(8))


def turned(x: Tensor, position: int, rope: Rope) -> Tensor:
    """x `[heads, d]` as its model has it at a position: pair by pair, as complex numbers."""
    found, pairs = x.double().clone(), len(rope.frequencies)
    for i, frequency in enumerate(rope.frequencies):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + pairs)
        angle = torch.tensor(position * frequency, dtype=torch.float64)
        found[:, a] = x[:, a].double() * angle.cos() - x[:, b].double() * angle.sin()
        found[:, b] = x[:, b].double() * angle.cos() + x[:, a].double() * angle.sin()
    return found


class Slow:
    """What a sequence has in its cache: keys without any position, and values."""

    def __init__(self, sinks: int, recent: int, rope: Rope, cap: float | None, text: bool) -> None:
        self.sinks, self.size, self.rope, self.cap, self.text = sinks, sinks + recent, rope, cap, text
        self.kept: list[tuple[int, Tensor, Tensor]] = []
        """Position in the text, key, value."""

    def read(self, position: int, q: Tensor, k: Tensor, v: Tensor, drop: bool) -> Tensor:
        """drop: before it is attended, what no longer fits goes: the oldest that is no sink."""
        self.kept.append((position, k, v))
        if drop:
            self.drop()
        numbers = [old[0] for old in self.kept] if self.text else list(range(len(self.kept)))
        keys = torch.stack([turned(old[1], n, self.rope) for n, old in zip(numbers, self.kept, strict=True)])
        values, query = torch.stack([old[2] for old in self.kept]).double(), turned(q, numbers[-1], self.rope)
        outs = []
        for head in range(HEADS):
            dots = keys[:, head // GROUP] @ query[head] * SCALE
            dots = dots if self.cap is None else self.cap * (dots / self.cap).tanh()
            outs.append(dots.softmax(0) @ values[:, head // GROUP])
        return torch.stack(outs)

    def drop(self) -> None:
        while len(self.kept) > self.size:
            del self.kept[self.sinks]


class World:
    def __init__(
        self,
        rope: Rope,
        cap: float | None = None,
        block: int = 4,
        positions: str = "cache",
        sinks: int = 3,
        recent: int = 9,
    ) -> None:
        shape = LayerShape(HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"), softcap=cap, rope=rope)
        own = {"sinks": sinks, "recent": recent, "block": block, "positions": positions}
        self.ledger = Ledger()
        self.runtime = Runtime([shape] * 2, compose(METHODS["streaming"], **own), self.ledger, 4, 160, True, True)
        self.rope, self.lengths = rope, [0, 0]
        self.slow = [[Slow(sinks, recent, rope, cap, positions == "text") for _ in range(2)] for _ in range(2)]
        self.draws = torch.Generator().manual_seed(1)

    def step(self, *new: int, captured: bool = False) -> None:
        step = Step.of((0, 1), tuple(self.lengths), new)
        running = self.runtime.begin(step)
        for layer in range(2):
            q, k, v = (torch.randn(step.tokens, n, DIM, generator=self.draws) for n in (HEADS, KV_HEADS, KV_HEADS))
            places = [h + i for h, n in zip(step.history, new, strict=True) for i in range(n)]
            there = [torch.stack([turned(x[i], p, self.rope) for i, p in enumerate(places)]).float() for x in (q, k)]
            if captured:
                wide = [torch.cat([x, torch.ones(2, *x.shape[1:])]) for x in (*there, v)]
                capture = self.runtime.begin_capture(4, host=False)
                out = self.runtime.attend(capture, layer, *wide, SCALE)[:2]
            else:
                out = self.runtime.attend(running, layer, *there, v, SCALE)
            for slot, (start, end) in enumerate(step.spans):
                history, slow = step.history[slot], self.slow[slot][layer]
                for i in range(start, end):
                    wanted = slow.read(history + i - start, q[i], k[i], v[i], drop=history > 0)
                    torch.testing.assert_close(out[i].double(), wanted, atol=3e-5, rtol=3e-5)
                slow.drop()
        self.runtime.commit(running)
        self.lengths = list(step.lengths)

    def take_back(self, slot: int, keep: int) -> None:
        self.runtime.truncate(slot, self.lengths[slot], keep)
        self.lengths[slot] = keep
        for layer in self.slow[slot]:
            layer.kept = [old for old in layer.kept if old[0] < keep]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("rope", "cap", "block"),
    [
        (Rope(FREQUENCIES), None, 4),
        (Rope(FREQUENCIES[:3], interleaved=True), 2.0, 1),
        (Rope(FREQUENCIES[:5]), None, 32),
    ],
)
def test_positions_are_those_inside_the_cache(rope: Rope, cap: float | None, block: int, captured: bool) -> None:
    world = World(rope, cap, block)
    world.step(30, 2)  # the second has fewer tokens than there are sinks
    for _ in range(14):
        world.step(1, 1, captured=captured)
    world.step(5, 7)
    for _ in range(4):
        world.step(1, 1, captured=captured)
    world.step(0, 4)


def test_positions_of_the_text_where_they_are_wanted() -> None:
    world = World(Rope(FREQUENCIES), positions="text")
    world.step(30, 2)
    for _ in range(12):
        world.step(1, 1)


@pytest.mark.parametrize("keep", [44, 38, 2, 0])
def test_tokens_taken_back(keep: int) -> None:
    world = World(Rope(FREQUENCIES))
    world.step(30, 30)
    for _ in range(15):
        world.step(1, 1)
    world.take_back(0, keep)
    world.step(3, 1)
    world.step(1, 1)
    world.take_back(0, keep + 2)
    for _ in range(12):
        world.step(1, 1)


def test_what_is_held_is_counted_and_given_back() -> None:
    worlds = {positions: World(Rope(FREQUENCIES), positions=positions) for positions in ("cache", "text")}
    held = {name: world.ledger.held["gpu"] for name, world in worlds.items()}
    assert held["cache"] - held["text"] == 5 * 4 * 2 * KV_HEADS * DIM * 4, "keys of (seqs + 1) x (sinks + 1) tokens"
    for world in worlds.values():
        world.runtime.release()
        assert world.ledger.held["gpu"] == 0


def test_a_rotation_that_changes_with_the_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="by how long the text is") as error:
        World(Rope(()))
    assert "positions=text" in error.value.hint
    World(Rope(()), positions="text")
