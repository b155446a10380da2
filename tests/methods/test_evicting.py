"""H2O and TOVA: what is dropped is gone for good, and which that is a slow re-statement of each rule says."""

from typing import Any

import pytest
import torch
from tests.cache.integrity import check_blocks
from tests.engine.small import greedy, llm, prompt
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

HEADS, KV_HEADS, DIM, SCALE, LAYERS = 6, 2, 16, 0.4, 2
GROUP = HEADS // KV_HEADS


class Slow:
    """One layer of one sequence, number by number: what stays, and what a query gets of it.

    heavy, recent: how many stay; shared: TOVA's rule, by the last query's weights over all heads, one set.
    """

    def __init__(self, heavy: float, recent: float, shared: bool, cap: float | None) -> None:
        self.sizes, self.shared, self.cap = (heavy, recent), shared, cap
        self.q, self.k, self.v = (torch.empty(0, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.kept: list[list[int]] = [[] for _ in range(KV_HEADS)]
        self.score: list[dict[int, float]] = [{} for _ in range(KV_HEADS)]
        self.stay: tuple[int, int] | None = None

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """New tokens, each of which sees what stayed and the new ones up to itself: what they get."""
        before = len(self.k)
        self.q, self.k, self.v = (torch.cat(pair) for pair in ((self.q, q), (self.k, k), (self.v, v)))
        outs = []
        for position in range(before, len(self.k)):
            for own, score in zip(self.kept, self.score, strict=True):
                own.append(position)
                score[position] = 0.0
            if self.shared:
                self.score = [dict.fromkeys(own, 0.0) for own in self.kept]
            outs.append(self._ask(position))
        return torch.stack(outs)

    def _ask(self, position: int) -> Tensor:
        outs = []
        for head in range(HEADS):
            own, score = self.kept[head // GROUP], self.score[head // GROUP]
            dots = (self.k[own, head // GROUP].double() @ self.q[position, head].double()) * SCALE
            dots = dots if self.cap is None else self.cap * (dots / self.cap).tanh()
            weights = dots.exp() / dots.exp().sum()
            outs.append(weights @ self.v[own, head // GROUP].double())
            for p, weight in zip(own, weights.tolist(), strict=True):
                for each in self.score if self.shared else [score]:
                    each[p] += weight
        return torch.stack(outs)

    def drop(self) -> None:
        """What is too many, after a prompt, a turn or a step."""
        length = len(self.k)
        if self.stay is None:
            heavy, recent = (max(1, int(n * length)) if 0 < n < 1 else int(n) for n in self.sizes)
            self.stay = heavy, recent
        heavy, recent = self.stay
        for own, score in zip(self.kept, self.score, strict=True):
            while len(own) > heavy + recent:
                others = [p for p in own if p < length - recent]
                worst = min(others, key=score.__getitem__)
                own.remove(worst)
                del score[worst]


class World:
    """Several sequences under a row and under the slow rule."""

    def __init__(
        self, method: str, seqs: int = 3, softcap: float | None = None, fixed: bool = False, block: int = 4, **own: Any
    ) -> None:
        shape = LayerShape(HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"), softcap=softcap)
        composed = compose(METHODS[method], block=block, **own)
        self.runtime = Runtime([shape] * LAYERS, composed, Ledger(), seqs, 160 if fixed else None, fixed, fixed)
        self.draws, self.lengths = torch.Generator().manual_seed(1), [0] * seqs
        size = composed.params.get("cache_size")
        given = (composed.params.get("heavy", size), composed.params.get("recent", 0))
        rule = (size is not None, softcap)
        self.slow = [[Slow(*given, *rule) for _ in range(LAYERS)] for _ in range(seqs)]

    def step(self, *new: int, check: bool = True, **planted: Tensor) -> list[Tensor]:
        step = Step.of(tuple(range(len(new))), tuple(self.lengths[: len(new)]), new)
        deciding = all(n == 1 for n in new) and any(step.history)
        if deciding:
            for layer in (each for slot in self.slow[: len(new)] for each in slot):
                layer.drop()
        running = self.runtime.begin(step)
        found = []
        for layer in range(LAYERS):
            made = [torch.randn(step.tokens, n, DIM, generator=self.draws) for n in (HEADS, KV_HEADS, KV_HEADS)]
            made = [planted.get(name, x) for name, x in zip("qkv", made, strict=True)]
            found.append(self.runtime.attend(running, layer, *made, SCALE))
            if check:
                wanted = [
                    self.slow[slot][layer].read(*(x[a:b] for x in made))
                    for slot, (a, b) in enumerate(step.spans)
                    if b > a
                ]
                torch.testing.assert_close(found[-1].double(), torch.cat(wanted), atol=2e-5, rtol=2e-5)
        self.runtime.commit(running)
        self.lengths[: len(new)] = step.lengths
        if deciding and check:
            for layer in (each for slot in self.slow[: len(new)] for each in slot):
                layer.drop()
            self.compare()
        return found

    def kept(self, slot: int, layer: int) -> list[list[int]]:
        """By KV head: positions that are stored."""
        maintenance: Any = self.runtime.groups[0].maintenance
        return [sorted(map(int, own)) for own in maintenance._entries(layer, slot)[1].tolist()]

    def compare(self) -> None:
        for slot, layers in enumerate(self.slow):
            for layer, wanted in enumerate(layers):
                assert self.kept(slot, layer) == wanted.kept, (slot, layer)


ROWS = [("h2o", {"heavy": 7, "recent": 5}), ("h2o", {"heavy": 0.25, "recent": 0.1}), ("tova", {"cache_size": 12})]


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize(("method", "params"), ROWS, ids=str)
def test_keeps_what_the_slow_rule_keeps(method: str, params: dict[str, Any], softcap: float | None) -> None:
    world = World(method, softcap=softcap, **params)
    world.step(30, 19, 10)
    world.step(3, 0, 0)  # a later chunk of the first prompt
    for _ in range(14):
        world.step(1, 1, 1)
    world.step(5, 1, 0)  # a turn sees what stayed, and is weighed with it
    for _ in range(9):
        world.step(1, 1, 1)


def test_the_queries_of_a_prompt_are_weighed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coattn.baselines.evicting.evict.MAX_SCORES", 50)
    world = World("h2o", seqs=1, heavy=7, recent=5)
    world.step(40)
    world.step(1)


@pytest.mark.parametrize(("method", "params"), ROWS, ids=str)
def test_memory_holds_what_stays(method: str, params: dict[str, Any]) -> None:
    world = World(method, fixed=True, **params)
    gpu: Any = world.runtime.groups[0].cache.gpu
    world.step(100, 60, 17)
    before = gpu.table.used()
    world.step(1, 1, 1)
    stay = [sum(layers[0].stay or ()) for layers in world.slow]
    blocks = sum(-(-min(n + 1, length + 1) // 4) for n, length in zip(stay, (100, 60, 17), strict=True))
    assert gpu.table.used() == blocks + 1, "and one for padding rows"
    assert gpu.table.used() < before / 2
    check_blocks(gpu.table)
    near, far = world.runtime.attended(Step.of((0, 1, 2), (100, 60, 17), (1, 1, 1)))
    assert (near, far) == (sum(min(n, length) + 1 for n, length in zip(stay, (100, 60, 17), strict=True)), 0)


@pytest.mark.parametrize("method", ["h2o", "tova"])
def test_tokens_taken_back_are_never_attended_again(method: str) -> None:
    params = {"cache_size": 12} if method == "tova" else {"heavy": 7, "recent": 5}
    world = World(method, seqs=1, **params)
    world.step(40)
    for _ in range(10):
        world.step(1)
    for back in (3, 8):
        keep = world.lengths[0] - back
        world.runtime.truncate(0, world.lengths[0], keep)
        before = [[own[:] for own in layer.kept] for layer in world.slow[0]]
        world.lengths[0] = keep
        for layer in range(LAYERS):
            found = world.kept(0, layer)
            left = [[p for p in own if p < keep] for own in before[layer]]
            assert all(set(own) <= set(most) for own, most in zip(found, left, strict=True))
            assert {len(own) for own in found} == {
                min(len(o) for each in before for o in [[p for p in x if p < keep] for x in each])
            }
            slow = world.slow[0][layer]
            slow.q, slow.k, slow.v = (x[:keep] for x in (slow.q, slow.k, slow.v))
            slow.kept = found
            slow.score = [{p: score[p] for p in own} for own, score in zip(found, slow.score, strict=True)]
        world.step(1)
        world.step(1)


def test_a_slot_that_another_sequence_takes_over_starts_anew() -> None:
    world = World("h2o", seqs=1, heavy=0.2, recent=4)
    world.step(60)
    world.step(1)
    world.lengths, world.slow = [0], World("h2o", seqs=1, heavy=0.2, recent=4).slow
    world.step(20)
    world.step(1)
    assert world.slow[0][0].stay == (4, 4)


def test_of_keys_without_queries_the_newest_stay() -> None:
    world = World("h2o", seqs=1, heavy=7, recent=5)
    running = world.runtime.begin(Step.of((0,), (0,), (60,)))
    for layer in range(LAYERS):
        world.runtime.import_kv(running, layer, *(torch.randn(60, KV_HEADS, DIM) for _ in "kv"), None, SCALE)
    world.runtime.commit(running)
    running = world.runtime.begin(Step.of((0,), (60,), (1,)))
    assert world.kept(0, 1) == [[*range(48, 60)]] * KV_HEADS


def test_a_step_that_fails_leaves_no_weights_behind() -> None:
    worlds = [World("h2o", seqs=1, heavy=7, recent=5) for _ in range(2)]
    for world in worlds:
        world.step(30, check=False)
    broken = worlds[0].runtime
    running = broken.begin(Step.of((0,), (30,), (4,)))
    broken.attend(running, 0, *(torch.randn(4, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)), SCALE)
    broken.abort(running)
    for world in worlds:
        world.step(1, check=False)
    assert worlds[0].kept(0, 0) == worlds[1].kept(0, 0)


@pytest.mark.parametrize(("method", "params"), [ROWS[0], ROWS[2]], ids=str)
def test_an_engine_reads_one_prompt_beside_what_is_left_of_others(method: str, params: dict[str, Any]) -> None:
    """Memory for one whole prompt and little more: what is dropped makes room for the next."""
    prompts = [prompt(120, seed=i) for i in range(4)]
    block = 8 * (2 * 2 * 2 * 8 * 4 + 2 * 2 * 8)
    with llm(method, **params) as engine:
        alone = [engine.generate(ids, greedy(12))[0].token_ids for ids in prompts]
    with llm(method, gpu_kv=28 * block, **params) as engine:
        together = engine.generate(prompts, greedy(12))
        assert engine.report()["preemptions"] == 0
    assert [each.token_ids for each in together] == alone


def needle(method: str, asked_in_prompt: bool, **params: Any) -> float:
    """How much of a token's value a later query finds that points at its key, and at nothing else."""
    world = World(method, seqs=1, **params)
    q, k, v = torch.zeros(100, HEADS, DIM), torch.zeros(100, KV_HEADS, DIM), torch.zeros(100, KV_HEADS, DIM)
    k[30, :, 0] = v[30, :, 0] = 20.0
    k[:, :, 1] = 0.3 * torch.rand(100, 1, generator=world.draws)
    q[:, :, 1] = 1.0
    if asked_in_prompt:
        q[-8:, :, 0] = 2.0
    world.step(100, q=q, k=k, v=v)
    q = torch.zeros(1, HEADS, DIM)
    q[:, :, 0] = 2.0
    return float(world.step(1, q=q, k=torch.zeros(1, KV_HEADS, DIM), v=torch.zeros(1, KV_HEADS, DIM))[0].max()) / 20


@pytest.mark.parametrize(("method", "params"), [ROWS[0], ROWS[2]], ids=str)
def test_what_no_query_has_asked_for_is_lost_to_a_later_one(method: str, params: dict[str, Any]) -> None:
    assert needle(method, False, **params) < 0.1
    assert needle(method, True, **params) > 0.9
