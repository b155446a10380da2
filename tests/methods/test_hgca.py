"""HGCA: exact with beta = 0, entries that come back with a changed topic, thresholds against fixed numbers."""

from typing import Any, cast

import pytest
import torch
from tests.engine.small import greedy, llm, prompt
from tests.methods.fetched import KV_HEADS, World

from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.parts.index.averages import Averages
from coattn.parts.maintenance.entries import entries
from coattn.parts.maintenance.entries.entries import Entries
from coattn.parts.select.maw_threshold import MawThreshold
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step


def test_decode_steps_change_nothing_that_a_prompt_chose() -> None:
    world = World(METHODS["hgca"], block=8, window_blocks=2, beta=2.5)
    world.step(90, 40)
    world.step(1, 1)
    lists = cast("Entries", world.runtime.groups[0].maintenance).lists

    def kept(head: int) -> list[int]:
        return lists.positions(1, 0, head)[: int(lists.shown[1, 0, head])].tolist()

    chosen = [kept(head) for head in range(KV_HEADS)]
    for _ in range(6):
        world.step(1, 1)
    assert [kept(head)[: len(own)] for head, own in enumerate(chosen)] == chosen


def test_sequences_of_one_length_leave_the_window_one_after_another() -> None:
    """Six at a time, two in a step; whatever the order, nothing is lost and nothing attended twice."""
    shape = LayerShape(2, 1, 16, torch.float32, torch.device("cpu"))
    runtimes = [
        Runtime([shape], compose(METHODS[name], block=16, **params), Ledger(), 6, 400)
        for name, params in (("hgca", {"beta": 0, "window_blocks": 2}), ("full", {}))
    ]
    maintenance = cast("Entries", runtimes[0].groups[0].maintenance)
    draws = torch.Generator().manual_seed(0)
    length, most = 0, 0
    for new in (40, *[1] * 60):
        step = Step.of(tuple(range(6)), (length,) * 6, (new,) * 6)
        q, k, v = (torch.randn(6 * new, heads, 16, generator=draws) for heads in (2, 1, 1))
        outs = []
        covered = dict(maintenance._covered)
        for runtime in runtimes:
            running = runtime.begin(step)
            outs.append(runtime.attend(running, 0, q, k, v, 0.25))
            runtime.commit(running)
        torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
        if new == 1 and length > 40:
            most = max(most, sum(maintenance._covered[slot] > covered[slot] for slot in range(6)))
        length += new
    assert most == 2


def test_in_eight_bits_an_answer_does_not_depend_on_who_else_is_served() -> None:
    """Lists share one memory, and blocks change hands in it; under a budget in DRAM, which is kept."""
    prompts = [prompt(n) for n in (100, 9, 61, 140, 33)]
    params: dict[str, Any] = {"beta": 1, "window_blocks": 2, "host_dtype": "int8"}
    alone = []
    for ids in prompts:
        with llm("hgca", max_batch=1, **params) as engine:
            alone.append(engine.generate([ids], greedy(60))[0].token_ids)
    with llm("hgca", max_batch=3, host_kv=400_000, **params) as engine:
        handles = [engine.submit(ids, greedy(60)) for ids in prompts]
        assert [handle.result().token_ids for handle in handles] == alone
        assert 0 < engine.ledger.peak["host"] <= 400_000


class Topics:
    """One layer, one head: entries about one of two topics, in the middle of others about neither."""

    def __init__(self, **params: Any) -> None:
        shape = LayerShape(2, 1, 16, torch.float32, torch.device("cpu"))
        row = compose(METHODS["hgca"], block=8, window_blocks=2, **params)
        self.runtime = Runtime([shape], row, Ledger(), 1, 400)
        self.maintenance = cast("Entries", self.runtime.groups[0].maintenance)
        self.length = 0
        self.keys = torch.empty(0, 16)
        draws = torch.Generator().manual_seed(0)
        self.noise = lambda n: 0.1 * torch.randn(n, 16, generator=draws)
        self.topic = torch.eye(16)[:2] * 12

    def read(self, about: list[int | None], asking: int) -> None:
        """Tokens about topics, whose queries ask for one."""
        n = len(about)
        k = self.noise(n) + torch.stack([torch.zeros(16) if t is None else self.topic[t] for t in about])
        q = (self.noise(n) + self.topic[asking])[:, None].expand(-1, 2, -1)
        step = Step.of((0,), (self.length,), (n,))
        running = self.runtime.begin(step)
        self.runtime.attend(running, 0, q.contiguous(), k[:, None], k[:, None], 0.05)
        self.runtime.commit(running)
        self.length += n
        self.keys = torch.cat([self.keys, k])

    def recalled(self, asking: int) -> float:
        """Share of the mass of a query about a topic that lies on what is attended."""
        weights = (self.keys @ self.topic[asking] * 0.05).softmax(0)
        far = self.maintenance.gpu.first(self.length) * self.maintenance.block
        chosen = self.maintenance.lists.positions(0, 0, 0).long()
        assert chosen.max() < far
        return float(weights[chosen].sum() + weights[far:].sum())


def test_a_changed_topic_brings_its_entries_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "QUERIES", 4)
    world = Topics()
    about = [0 if i in range(20, 30) else 1 if i in range(50, 60) else None for i in range(120)]
    world.read(about, asking=0)
    for _ in range(20):
        world.read([None], asking=0)
    assert world.recalled(0) > 0.95
    assert world.recalled(1) < 0.5
    world.read([None] * 12, asking=1)
    world.read([None], asking=1)
    assert world.recalled(1) > 0.95
    assert world.recalled(0) < 0.5, "what no longer matters has left"


def test_a_threshold_recalls_more_mass_than_as_many_entries_for_every_head() -> None:
    """Heads that look at 3, at 30 and at 300 of 1,000 entries: the paper's observation that heads differ."""
    weights = torch.full((3, 1000), 1e-6)
    for head, wide in enumerate((3, 30, 300)):
        weights[head, torch.randperm(1000, generator=torch.Generator().manual_seed(head))[:wide]] = 1.0
    weights /= weights.sum(-1, keepdim=True)
    own = MawThreshold(beta=1.0).keep(weights, 1000)
    count = round(float(own.double().mean()) * 1000)
    same = torch.zeros_like(own).scatter_(-1, weights.topk(count, dim=-1).indices, True)
    assert own.sum() == same.sum() == 333
    assert own.sum(-1).tolist() == [3, 30, 300]
    assert float((weights * own).sum(-1).mean()) > 0.99 > 0.8 > float((weights * same).sum(-1).mean())


def test_moving_averages_go_on_over_a_turn() -> None:
    """A turn of many tokens leaves the averages of older entries where so many decode steps would have left them."""
    shape, alpha, draws = LayerShape(2, 1, 16, torch.float32, torch.device("cpu")), 0.25, torch.Generator()
    averages = []
    for turns in ([20, *[1] * 6, 5, 1], [20, *[1] * 12]):
        row = compose(METHODS["hgca"], block=8, window_blocks=6, alpha=alpha)
        runtime, length = Runtime([shape], row, Ledger(), 1, 400), 0
        draws.manual_seed(0)
        q, k, v = (torch.randn(40, heads, 16, generator=draws) for heads in (2, 1, 1))
        for new in turns:
            running = runtime.begin(Step.of((0,), (length,), (new,)))
            part = slice(length, length + new)
            runtime.attend(running, 0, q[part], k[part], v[part], 0.25)
            runtime.commit(running)
            length += new
        gpu, index = cast("Entries", runtime.groups[0].maintenance).gpu, cast("Averages", runtime.groups[0].index)
        ids, rows = gpu.places(0, torch.arange(length))
        averages.append(index.values[0][ids, 0, rows])
    by_turn, by_steps = averages
    torch.testing.assert_close(by_turn[:26], by_steps[:26])


def test_without_a_budget_the_window_is_no_smaller_than_a_page() -> None:
    shape = LayerShape(2, 1, 16, torch.float32, torch.device("cpu"))
    for tokens, ring in ((None, 33), (4096, 33), (320, 11)):
        group = Runtime([shape], compose(METHODS["hgca"]), Ledger(), 1, tokens).groups[0]
        assert cast("Entries", group.maintenance).gpu.ring == ring
