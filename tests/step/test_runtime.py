"""The runtime against the textbook: every row, mixed lengths, prefill, decode, append, windows, budgets."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from tests.cache.integrity import check_blocks
from tests.dense import assert_as_exact, dense

from coattn.cache.ledger import Ledger
from coattn.errors import BudgetError
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.parts.maintenance.entries.entries import Entries
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Phase, Step

TURNS = [(40, 3, 77), *[(1, 1, 1)] * 24, (5, 0, 33), (1, 1, 1), (70, 2, 1), *[(1, 1, 1)] * 10]
LOOK_BACK = 17


@dataclass
class World:
    """A runtime and everything it was ever given."""

    method: str
    device: torch.device
    params: dict[str, Any] = field(default_factory=dict)
    gpu: int | None = None
    seqs: int = 3
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    tokens: int | None = None
    look_back: int | None = LOOK_BACK
    """Of the middle layer."""
    devices: list[torch.device] | None = None
    """Of each layer; all on `device` when left out."""
    coded: bool = False
    """Whether keys and values are numbers that 8 bits hold exactly."""
    drift: float = 0.0
    """How much larger keys become with every token of a sequence."""

    def __post_init__(self) -> None:
        windows = (None, self.look_back, None)
        self.devices = self.devices or [self.device] * 3
        self.shapes = [
            LayerShape(6, 2, 16, self.dtype, device, window, self.softcap)
            for device, window in zip(self.devices, windows, strict=True)
        ]
        self.ledger = Ledger(self.gpu)
        self.runtime = Runtime(
            self.shapes, compose(METHODS[self.method], **self.params), self.ledger, self.seqs, self.tokens
        )
        empty = torch.empty(0, 2, 16, dtype=self.dtype)
        self.seen = [[(empty.to(shape.device),) * 2] * self.seqs for shape in self.shapes]
        self.lengths = [0] * self.seqs

    def step(self, new: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Runs one step; yields (output, exact, same-precision) for every layer and sequence with new tokens."""
        step = Step.of(tuple(range(self.seqs)), tuple(self.lengths), new)
        running = self.runtime.begin(step)
        for layer, shape in enumerate(self.shapes):
            q, k, v = (torch.randn(sum(new), heads, 16).to(shape.device, self.dtype) for heads in (6, 2, 2))
            if self.coded:
                k, v = ((x > 0).to(self.dtype) * (255 / 256) for x in (k, v))
            if self.drift:
                k += self.drift * max(self.lengths)
            out = self.runtime.attend(running, layer, q, k, v, 0.4)
            for i, (start, end) in enumerate(step.spans):
                keys, values = self.seen[layer][i]
                keys, values = torch.cat([keys, k[start:end]]), torch.cat([values, v[start:end]])
                self.seen[layer][i] = keys, values
                if end > start:
                    limits = self.limits(shape, step.history[i])
                    args = (q[start:end], keys, values, 0.4)
                    exact = dense(*args, **limits, softcap=self.softcap)
                    same = dense(*args, **limits, softcap=self.softcap, dtype=self.dtype)
                    yield out[start:end].cpu(), exact.cpu(), same.cpu()
        self.runtime.commit(running)
        self.lengths = list(step.lengths)

    def limits(self, shape: LayerShape, history: int) -> dict[str, int]:
        if shape.sliding_window is not None:
            return {"window": shape.sliding_window}
        if self.method == "streaming" and history:
            return {"window": self.params["recent"], "sinks": self.params["sinks"]}
        return {}

    def take_back(self, slot: int, keep: int) -> None:
        self.runtime.truncate(slot, self.lengths[slot], keep)
        self.lengths[slot] = keep
        for layer in self.seen:
            layer[slot] = layer[slot][0][:keep], layer[slot][1][:keep]

    def run(self, turns: list[tuple[int, ...]]) -> None:
        """All outputs of all turns together: an error bound over few numbers would be a matter of luck."""
        outs, exacts, sames = zip(*(part for new in turns for part in self.step(new)), strict=True)
        assert_as_exact(torch.cat(outs), torch.cat(exacts), torch.cat(sames))


CASES = [
    ("full", {}, None),
    ("full", {"block": 5}, None),
    ("offload", {}, None),
    ("offload", {"window_blocks": 3}, None),
    ("offload", {"block": 8, "window_blocks": 1}, 45_000),
    ("offload", {"block": 8}, 60_000),
    ("cpu", {"block": 8}, 60_000),
    ("cpu", {}, None),
    ("cpu", {"block": 4, "window_blocks": 2}, None),
    ("quest", {"block": 8, "budget": 256, "dense_layers": 0}, None),
    ("scout", {"block": 8, "budget": 256}, None),
    ("scout", {"block": 8, "budget": 256, "pool_blocks": 3, "recall_interval": 2, "window_blocks": 1}, None),
    ("scout", {"block": 4, "budget": 256, "pool_blocks": 20, "window_blocks": 3}, 330_000),
    ("scout", {"block": 8, "budget": 256, "pool_blocks": 4, "recall_interval": 2}, None),
    ("hgca", {"beta": 0, "block": 8, "window_blocks": 2}, None),
    ("hgca", {"beta": 0, "block": 1, "window_blocks": 3}, None),
    ("hgca", {"beta": 0, "block": 32, "window_blocks": 1}, None),
    ("hgca", {"beta": 0, "block": 8}, 70_000),
    ("hcattention", {"groups": 0, "tau": 1, "window_blocks": 1}, None),
    ("hcattention", {"groups": 0, "tau": 1.0, "block": 4, "window_blocks": 2, "tail": "none"}, None),
    ("hcattention", {"groups": 0, "tau": 1, "block": 8}, None),
    ("streaming", {"sinks": 4, "recent": 20}, None),
    ("streaming", {"sinks": 0, "recent": 9, "block": 4}, None),
]


@pytest.mark.parametrize(("method", "params", "gpu"), CASES)
def test_equals_the_textbook(method: str, params: dict[str, Any], gpu: int | None, device: torch.device) -> None:
    World(method, device, params, gpu).run(TURNS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["full", "offload", "cpu"])
def test_equals_the_textbook_in_half_precision(method: str, dtype: torch.dtype, device: torch.device) -> None:
    World(method, device, dtype=dtype).run(TURNS[:29])


@pytest.mark.parametrize("method", ["full", "offload", "cpu"])
def test_equals_the_textbook_with_soft_capping(method: str, device: torch.device) -> None:
    World(method, device, softcap=0.7).run(TURNS[:29])


@pytest.mark.parametrize(("method", "params"), [
    ("cpu", {"block": 8}),
    ("cpu", {"block": 5, "window_blocks": 2}),
    ("scout", {"block": 8, "budget": 256}),
    ("scout", {"block": 8, "budget": 256, "pool_blocks": 3, "recall_interval": 2, "window_blocks": 1}),
    ("hgca", {"block": 8, "beta": 0, "window_blocks": 2}),
    ("hgca", {"block": 5, "beta": 0, "window_blocks": 1}),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_in_dram_lose_nothing_of_numbers_they_hold(
    method: str, params: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    world = World(method, device, {**params, "host_dtype": "int8"}, dtype=dtype, coded=True)
    if dtype == torch.bfloat16:
        world.run(TURNS[:29])
    else:
        outs, exacts, _ = zip(*(part for new in TURNS for part in world.step(new)), strict=True)
        # the kernels' own rounding: queries and weights have 16 bits
        torch.testing.assert_close(torch.cat(outs), torch.cat(exacts).float(), atol=1e-4, rtol=0)
    block = params["block"]
    blocks = sum(length // block for length in world.lengths)
    # of the two layers without a window, for every head codes, scales and minima
    least = blocks * 2 * 2 * (2 * block * 16 + 4 * 16 + 4 * block)
    most = 1.6 * least + 4096 if method != "hgca" else 10 * least + (64 << 20)  # its lists grow by large pieces
    assert least <= world.ledger.held["host"] < most


def test_eight_bits_in_dram_are_close() -> None:
    world = World("cpu", torch.device("cpu"), {"block": 8, "host_dtype": "int8"})
    outs, exacts, _ = zip(*(part for new in TURNS for part in world.step(new)), strict=True)
    error = (torch.cat(outs) - torch.cat(exacts)).norm() / torch.cat(exacts).norm()
    assert 1e-4 < error < 0.01
    assert not compose(METHODS["cpu"], host_dtype="int8").exact
    assert compose(METHODS["cpu"]).exact


@pytest.mark.parametrize(("form", "least", "most"), [("int8", 1e-4, 0.01), ("int4", 0.01, 0.1)])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("block", [8, 5])
def test_few_bits_in_gpu_memory_are_close(
    form: str, least: float, most: float, softcap: float | None, block: int, device: torch.device
) -> None:
    world = World("full", device, {"block": block, "gpu_dtype": form}, softcap=softcap)
    outs, exacts, _ = zip(*(part for new in TURNS for part in world.step(new)), strict=True)
    assert least < (torch.cat(outs) - torch.cat(exacts)).norm() / torch.cat(exacts).norm() < most
    assert not compose(METHODS["full"], gpu_dtype=form).exact
    for group in world.runtime.groups:
        memory, whole = group.cache.gpu.memory, group.cache.spec.block_bytes(block)
        held = sum(memory[layer].nbytes for layer in memory.layers)
        assert held == memory.bytes
        if group.cache.spec.shape.sliding_window is None:  # a head of 16 channels has 8 bytes of scales and minima
            assert memory.block_bytes * 64 == whole * (24 if form == "int8" else 16)
    assert world.ledger.held["gpu"] == sum(group.cache.gpu.memory.bytes for group in world.runtime.groups)


@pytest.mark.parametrize("params", [{"block": 8, "window_blocks": 2, "beta": 1.0}, {"block": 6, "beta": 0.5}])
def test_hgca_chooses_the_same_of_eight_bits(params: dict[str, Any]) -> None:
    """Of numbers that 8 bits hold: what is kept, and so every output, is as with the model's own."""
    outs = []
    for dram in ("model", "int8"):
        torch.manual_seed(5)
        world = World("hgca", torch.device("cpu"), {**params, "host_dtype": dram}, coded=True)
        outs.append(torch.cat([part[0] for new in TURNS for part in world.step(new)]))
    torch.testing.assert_close(*outs, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("block", [8, 32])
def test_hgca_in_eight_bits_is_close_where_entries_come_a_few_at_a_time(block: int) -> None:
    """Entries that leave the window one by one, as their keys drift: none is clipped to the range of those before."""
    outs = []
    for dram in ("model", "int8"):
        torch.manual_seed(6)
        params = {"block": block, "window_blocks": 1, "beta": 2.0, "host_dtype": dram}
        world = World("hgca", torch.device("cpu"), params, look_back=None, drift=0.02)
        outs.append(torch.cat([part[0] for new in [(3, 20, 8), *[(1, 1, 1)] * 70] for part in world.step(new)]))
    assert 1e-5 < (outs[1] - outs[0]).norm() / outs[0].norm() < 0.01


@pytest.mark.parametrize("method", ["quest", "scout", "oracle", "hgca"])
def test_a_single_token_beside_a_longer_turn_attends_to_everything(method: str, device: torch.device) -> None:
    """Its step is no decode step, so nothing is picked for it."""
    params = {"hgca": {"beta": 1.0, "block": 8, "window_blocks": 1}, "oracle": {"budget": 32}}
    world = World(method, device, params.get(method, {"block": 8, "budget": 40}))
    world.run([(150, 90, 120)])
    world.run([(1, 7, 1), (5, 1, 1), (1, 1, 12), (1, 30, 1)])


@pytest.mark.parametrize(("method", "params", "gpu"), CASES)
def test_gives_every_byte_back(method: str, params: dict[str, Any], gpu: int | None) -> None:
    world = World(method, torch.device("cpu"), params, gpu)
    world.run(TURNS[:5])
    assert world.ledger.held["gpu"] > 0
    world.runtime.release()
    assert world.ledger.held == {"gpu": 0, "host": 0}


def test_a_capped_method_never_passes_its_cap() -> None:
    world = World("offload", torch.device("cpu"), {"block": 8}, gpu=45_000)
    world.run(TURNS)
    assert 0 < world.ledger.peak["gpu"] <= 45_000
    kept = sum(keys.shape[0] // 8 * 8 for keys, _ in world.seen[0]) * 2 * world.shapes[0].token_bytes
    assert world.ledger.held["host"] >= kept > 45_000


@pytest.mark.parametrize(("method", "params"), [(m, p) for m, p, _ in CASES])
def test_the_minimum_it_names_is_enough_and_one_byte_less_is_not(method: str, params: dict[str, Any]) -> None:
    tokens = max(map(sum, zip(*TURNS[:5], strict=True)))
    with pytest.raises(BudgetError, match="needs at least") as caught:
        World(method, torch.device("cpu"), params, gpu=1, tokens=tokens)
    least = caught.value.least
    assert least is not None
    with pytest.raises(BudgetError):
        World(method, torch.device("cpu"), params, gpu=least - 1, tokens=tokens)
    World(method, torch.device("cpu"), params, gpu=least, tokens=tokens).run(TURNS[:5])


@pytest.mark.parametrize("method", ["infinigen", "pqcache", "auto"])
def test_any_budget_above_the_minimum_opens(method: str) -> None:
    """What an index keeps of blocks takes what there is room for: blocks that are brought in still have theirs."""
    given = [LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))] * 2, compose(METHODS[method])
    with pytest.raises(BudgetError) as caught:
        Runtime(*given, Ledger(1), 2, 4096, fixed=True)
    least = caught.value.least
    assert least is not None
    for more in range(0, 200_000, 11_111):
        Runtime(*given, Ledger(least + more), 2, 4096, fixed=True).release()


def test_a_refused_step_changes_nothing() -> None:
    world = World("full", torch.device("cpu"), {"block": 4}, gpu=120_000)
    world.run(TURNS[:3])
    held = dict(world.ledger.held)
    with pytest.raises(BudgetError, match="gpu_kv"):
        world.runtime.begin(Step.of((0, 1, 2), tuple(world.lengths), (10_000, 1, 1)))
    assert world.ledger.held == held
    world.run([(1, 1, 1), (2, 1, 1)])


@pytest.mark.parametrize("window_blocks", [1, 3])
@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("full", {}),
        ("cpu", {}),
        ("cpu", {"host_dtype": "int8"}),
        ("offload", {}),
        ("quest", {"budget": 256}),
        ("scout", {"budget": 256, "pool_blocks": 4}),
        ("scout", {"budget": 256, "pool_blocks": 4, "host_dtype": "int8"}),
        ("hgca", {"beta": 0}),
        ("hgca", {"beta": 0, "host_dtype": "int8"}),
    ],
)
def test_tokens_can_be_taken_back(method: str, params: dict[str, Any], window_blocks: int) -> None:
    if method != "full":
        params = {**params, "block": 8} | ({} if method == "quest" else {"window_blocks": window_blocks})
    # no sliding layer here: what it has dropped cannot come back
    packed = "host_dtype" in params
    dtype = torch.bfloat16 if packed else torch.float32  # the kernels round queries to 16 bits
    world = World(method, torch.device("cpu"), params, look_back=None, dtype=dtype, coded=packed)
    world.run(TURNS[:20])
    for slot, keep in ((0, 41), (2, 16)):
        world.take_back(slot, keep)
    world.run([(1, 1, 1)] * 12 + [(3, 40, 2), (1, 1, 1)])
    cache = world.runtime.groups[0].cache
    table = cache.gpu.table if cache.host is None else cache.host.table  # type: ignore[attr-defined]
    check_blocks(table)
    table.owned[0].append(table.owned[1][0])
    with pytest.raises(AssertionError, match="exactly once"):
        check_blocks(table)


def test_blocks_that_come_back_to_hgcas_window_weigh_what_they_did() -> None:
    world = World("hgca", torch.device("cpu"), {"beta": 0, "window_blocks": 2, "block": 8}, look_back=None)
    world.run(TURNS[:20])
    maintenance = cast("Entries", world.runtime.groups[0].maintenance)
    assert world.lengths[2] == 96
    before = [maintenance.lists.of_block(0, 2, 1, b) for b in (2, 3, 4)]
    world.runtime.truncate(2, 96, 40)  # blocks 2, 3 and 4 are the newest again, 5 to 11 are gone
    assert maintenance.gpu.first(40) == 2
    for b, (rows, weights) in zip((2, 3, 4), before, strict=True):
        assert rows.tolist() == list(range(8))
        assert weights.sum() > 0
        torch.testing.assert_close(maintenance.averages[0][maintenance.gpu.block_id(2, b), 1], weights)


def test_a_window_forgets_what_is_taken_back() -> None:
    world = World("streaming", torch.device("cpu"), {"sinks": 4, "recent": 30}, look_back=None)
    world.run([(20, 3, 25)])
    world.take_back(2, 10)
    world.run([(1, 1, 1)] * 3 + [(1, 1, 2)])


def test_a_window_holds_exactly_what_it_declares() -> None:
    world = World("streaming", torch.device("cpu"), {"sinks": 4, "recent": 28, "block": 8})
    world.run([(50, 50, 50), (1, 1, 1)])
    step = Step(Phase.EXTEND, (0, 1, 2), (51,) * 3, (1, 1, 1))
    near = world.runtime.groups[1].cache.visible(0, step).gpu
    assert near.tokens.flatten().tolist() == [32, 32, 32]
    sliding = 1 * 32 * world.shapes[0].token_bytes  # one layer, 17 tokens in a block of 32
    assert world.ledger.held["gpu"] == 3 * (2 * 32 * world.shapes[0].token_bytes + sliding)


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "params", "gpu"), CASES)
def test_layers_on_two_devices_keep_their_caches_with_them(
    method: str, params: dict[str, Any], gpu: int | None
) -> None:
    devices = [torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:0")]
    # each device has a window and a staging memory of its own
    world = World(method, devices[1], params, None if gpu is None else 4 * gpu, devices=devices)
    assert [world.runtime._by_layer[i].cache.gpu.memory[i].device for i in range(3)] == devices
    world.run(TURNS)


@pytest.mark.parametrize(
    ("method", "params", "entries"),
    [
        ("oracle", {"budget": 10}, 10),
        ("full", {}, 41),
        ("streaming", {"sinks": 4, "recent": 99}, 41),
        ("streaming", {"sinks": 4, "recent": 9}, 13),
    ],
)
def test_what_a_step_attended_to_is_counted_within_its_budget(
    method: str, params: dict[str, Any], entries: int
) -> None:
    world = World(method, torch.device("cpu"), params, look_back=None)
    for new in ((40, 40, 40), (1, 1, 1)):
        for _ in world.step(new):
            pass
    assert world.runtime.attended(Step.of((0, 1, 2), (40,) * 3, (1,) * 3)) == (3 * entries, 0)
