"""A decode step with padding rows, as it is captured for a GPU, against the same step without."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

SLOTS, LENGTH, HEADS, KV_HEADS, D = 5, 200, 4, 2, 16
CASES = [
    ("full", {"block": 8}),
    ("full", {"block": 8, "gpu_dtype": "int4"}),
    ("offload", {"block": 8}),
    ("cpu", {"block": 8, "window_blocks": 3}),
    ("cpu", {"block": 8, "window_blocks": 30}),
    ("quest", {"block": 8, "budget": 48, "dense_layers": 0}),
    *(("quest", {"block": 8, "budget": budget, "dense_layers": 1}) for budget in (32, 64, 400)),
    ("oracle", {"budget": 20}),
    ("snapkv", {"budget": 16, "window": 5, "kernel": 3}),
    ("infinigen", {"block": 8, "budget": 12, "alpha": 1.5, "dense_layers": 1, "partial": 0.4}),
    ("pqcache", {"block": 8, "sinks": 4, "compress": 0.3, "subbits": 4}),
    ("scout", {"block": 8, "budget": 48, "recall_interval": 3}),
    ("scout", {"block": 8, "budget": 48, "recall_interval": 0, "pool_blocks": 2, "dense_layers": 1}),
    ("scout", {"block": 8, "budget": 48, "recall_interval": 3, "ahead_from": 1}),
    ("streaming", {"sinks": 3, "recent": 17, "block": 4}),
    ("h2o", {"block": 8, "heavy": 9, "recent": 6}),
    ("h2o", {"block": 4, "heavy": 0.25, "recent": 0.1}),
    ("tova", {"block": 4, "cache_size": 11}),
    ("duo", {"block": 4, "sinks": 3, "recent": 9}),
    ("hgca", {"beta": 0.5, "block": 8, "window_blocks": 3}),
    ("cpu", {"block": 8, "window_blocks": 3, "host_dtype": "int8"}),
    ("scout", {"block": 8, "budget": 48, "recall_interval": 3, "host_dtype": "int8"}),
    ("hgca", {"beta": 0.5, "block": 8, "window_blocks": 3, "host_dtype": "int8"}),
    ("hcattention", {"block": 8, "window_blocks": 2, "groups": 8, "centroids": 32, "tau": 0.8}),
    ("hcattention", {"block": 8, "groups": 0, "tau": 1.0, "host_dtype": "int8"}),
    ("hcattention", {"block": 8, "groups": 8, "centroids": 32, "tau": 0.8, "sink_blocks": 2}),
]


def shapes(count: int, window: int | None) -> list[LayerShape]:
    plain = LayerShape(HEADS, KV_HEADS, D, torch.float32, torch.device("cpu"))
    sliding = LayerShape(HEADS, KV_HEADS, D, torch.float32, torch.device("cpu"), sliding_window=window)
    return [plain if window is None or i % 2 else sliding for i in range(count)]


class Stays(TorchDispatchMode):
    """Fails where a number of a tensor goes to the host: `.item()`, `int(x)`, `if x:`. A capture would fail too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a number went to the host"
        return func(*args, **(kwargs or {}))


class World:
    """The same sequences in two runtimes: the steps of one have a padding row, where there is a slot for it."""

    def __init__(self, method: str, params: dict[str, Any], window: int | None) -> None:
        layers = shapes(3, window)
        self.ledger = Ledger()
        composed = compose(find_method(method), **params)
        self.plain, self.padded = (
            Runtime(layers, composed, self.ledger, SLOTS, LENGTH, True, padding=True) for _ in range(2)
        )
        self.history: dict[int, int] = {}

    def new(self, tokens: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(tokens, h, D) for h in (HEADS, KV_HEADS, KV_HEADS))

    def join(self, slot: int, tokens: int) -> None:
        step = Step.of((slot,), (0,), (tokens,))
        running = [(runtime, runtime.begin(step)) for runtime in (self.plain, self.padded)]
        for layer in range(3):
            q, k, v = self.new(tokens)
            for runtime, each in running:
                runtime.attend(each, layer, q, k, v, 0.25)
        for runtime, each in running:
            runtime.commit(each)
        self.history[slot] = tokens

    def leave(self, slot: int) -> None:
        for runtime in (self.plain, self.padded):
            runtime.truncate(slot, self.history[slot], 0)
        del self.history[slot]

    def release(self) -> None:
        for runtime in (self.plain, self.padded):
            runtime.release()

    def steps(self, count: int, order: list[int]) -> None:
        for _ in range(count):
            step = Step.of(tuple(order), tuple(self.history[s] for s in order), (1,) * len(order))
            plain, padded = (runtime.begin(step) for runtime in (self.plain, self.padded))
            rows = min(SLOTS, len(order) + 1)
            tensors = [self.new(rows) for _ in range(3)]
            real = [tuple(x[: len(order)] for x in each) for each in tensors]
            capture = self.padded.begin_capture(rows, self.padded.reaches_host(step))
            with nullcontext() if self.padded.composed.method.executor == "cpu" else Stays():
                got = [self.padded.attend(capture, i, *tensors[i], 0.25)[: len(order)] for i in range(3)]
            want = [self.plain.attend(plain, i, *real[i], 0.25) for i in range(3)]
            self.plain.commit(plain)
            self.padded.commit(padded)
            torch.testing.assert_close(torch.stack(got), torch.stack(want), atol=1e-5, rtol=1e-4)
            for slot in order:
                self.history[slot] += 1


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize(("method", "params"), CASES)
def test_padding_rows_change_nothing(method: str, params: dict[str, Any], window: int | None) -> None:
    world = World(method, params, window)
    held = dict(world.ledger.held)
    world.join(3, 5)
    world.steps(4, [3])
    world.join(0, 61)
    world.join(1, 1)
    world.steps(20, [0, 3, 1])
    world.steps(5, [1, 0, 3])
    world.leave(0)
    world.steps(3, [3, 1])
    world.join(0, 16)
    world.join(4, 100)
    world.steps(17, [4, 0, 1, 3])
    assert world.ledger.held["gpu"] == held["gpu"]
    assert world.ledger.held["host"] == held["host"] or method == "hgca", "what is chosen of DRAM grows as it is chosen"
    world.release()
    assert world.ledger.held == {"gpu": 0, "host": 0}


@pytest.mark.parametrize("method", ["full", "offload", "cpu", "streaming", "quest", "scout"])
def test_a_fixed_runtime_takes_its_memory_once_and_gives_it_back(method: str) -> None:
    ledger = Ledger(gpu=400_000, host=300_000)
    params = {"pool_blocks": 2} if method == "scout" else {}
    runtime = Runtime(shapes(2, None), compose(find_method(method), **params), ledger, SLOTS, LENGTH, fixed=True)
    held, free = dict(ledger.held), runtime.free_bytes()
    for tier, count in runtime.bytes_for(100).items():
        left = free[tier]
        assert left is not None
        assert 0 < count <= left
    running = runtime.begin(Step.of((2,), (0,), (100,)))
    runtime.commit(running)
    assert ledger.held == held
    for tier, count in runtime.bytes_for(100).items():
        left, before = runtime.free_bytes()[tier], free[tier]
        assert before - left == count
    runtime.truncate(2, 100, 0)
    assert runtime.free_bytes() == free
    runtime.release()
    assert ledger.held == {"gpu": 0, "host": 0}
