"""Captured decode steps against the same steps run layer by layer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.hf.families import FAMILIES, tiny
from transformers import LlamaConfig, LlamaForCausalLM

from coattn.cache.ledger import Ledger
from coattn.engine.runner.capture import bucket_for, capture_sizes
from coattn.engine.runner.runner import Runner
from coattn.errors import WorkerError
from coattn.hf.forward import Session
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.native.core import extension
from coattn.step.runtime import Runtime
from coattn.types import Step
from coattn_lab.bench.random_model import random_model

SLOTS, LENGTH = 4, 256


def test_capture_sizes() -> None:
    assert capture_sizes(1) == (1,)
    assert capture_sizes(16) == (1, 2, 4, 8, 16)
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert bucket_for(capture_sizes(20), 17) == 20
    assert bucket_for(capture_sizes(20), 3) == 4


class World:
    """The same sequences under a captured and a plain runner, each with a runtime of its own."""

    def __init__(self, model: Any, method: str, length: int = LENGTH, **params: Any) -> None:
        from coattn.engine.runner.capture import GraphRunner

        self.ledger = Ledger()
        self.session = Session(model)
        composed = compose(find_method(method), **params)
        layers = self.session.layers
        self.plain = Runner(self.session, Runtime(layers, composed, Ledger(), SLOTS, length, fixed=True), SLOTS)
        self.captured = GraphRunner(
            self.session, Runtime(layers, composed, self.ledger, SLOTS, length, fixed=True), SLOTS
        )
        self.vocabulary = self.session.vocabulary
        self.history = {}
        # a value that lies between two levels is rounded to either, by the last bit of what came before
        plain = not {"int8", "int4"} & {params.get("host_dtype"), params.get("gpu_dtype")}
        self.atol = 2e-4 if plain else 1e-2
        # the last bit also decides whether an entry at the border of a share is kept, and under which code a key is
        self.borders = method in ("hcattention", "infinigen", "pqcache") and params.get("tau", 0.95) < 1
        self.borders |= params.get("gpu_dtype") == "int4"
        self.rows: list[tuple[float, float]] = []
        self.rounding: float | None = None
        """In 16 bits: how far a logit may be off, of the largest."""
        self.spread: float | None = None
        """The same of the root of the mean square of a row's logits."""

    def join(self, slot: int, tokens: int) -> None:
        ids = torch.randint(0, self.vocabulary, (tokens,)).tolist()
        for runner in (self.plain, self.captured):
            runner.extend(slot, ids[: tokens // 2], 0, False)
            runner.extend(slot, ids[tokens // 2 :], tokens // 2, True)
        self.history[slot] = tokens

    def leave(self, slot: int) -> None:
        for runner in (self.plain, self.captured):
            runner.runtime.truncate(slot, self.history[slot], 0)
        del self.history[slot]

    def steps(self, count: int) -> None:
        slots = sorted(self.history)
        for _ in range(count):
            tokens = torch.randint(0, self.vocabulary, (len(slots),)).tolist()
            history = [self.history[slot] for slot in slots]
            want = self.plain.decode(slots, tokens, history)
            got = self.captured.decode(slots, tokens, history)
            if self.spread is not None:
                off, size = ((x.float().square().mean(-1)).sqrt() for x in (got - want, want))
                assert (off < self.spread * size).all(), (off / size).tolist()
            elif self.rounding is not None:
                assert (got - want).abs().max() < self.rounding * want.abs().max()
            elif self.borders:
                self.compare(got, want)
            else:
                torch.testing.assert_close(got, want, atol=self.atol, rtol=1e-3)
            for slot in slots:
                self.history[slot] += 1

    def compare(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Where there are borders: nearly all rows are as close as without, and the others are not far off."""
        error = (got - want).abs() - 1e-3 * want.abs()
        self.rows += [(float(row.max()), float(scale)) for row, scale in zip(error, want.std(-1), strict=True)]
        assert all(worst < self.atol + 0.1 * scale for worst, scale in self.rows), self.rows[-len(got) :]
        off = [worst for worst, _ in self.rows if worst > self.atol]
        assert len(off) <= max(4, len(self.rows) // 10), off

    def close(self) -> None:
        self.captured.drop_captures()
        self.captured.fusion.close()
        self.captured.runtime.release()
        self.plain.close()


@pytest.fixture
def world() -> Iterator[Any]:
    made: list[World] = []

    def make(model: Any, method: str, **params: Any) -> World:
        made.append(World(model, method, **params))
        return made[-1]

    yield make
    for each in made:
        each.close()


SCOUT = {"block": 8, "budget": 32, "window_blocks": 1, "recall_interval": 3, "ahead_from": 1}
CODED = {"block": 8, "window_blocks": 1, "groups": 4, "centroids": 32, "tau": 0.8}
# what steps wait for hangs on what audits find, which differs in its last bits
AUTO = {"block": 8, "window_blocks": 1, "pool_share": 0.125, "now": 2.0, "far": 1.0, "audit": False}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "full, int8": ("full", {"gpu_dtype": "int8"}),
    "full, int4": ("full", {"block": 8, "gpu_dtype": "int4"}),
    "offload": ("offload", {"block": 8, "window_blocks": 2}),
    "streaming": ("streaming", {"sinks": 4, "recent": 20}),
    "quest": ("quest", {"block": 8, "budget": 32, "dense_layers": 1}),
    "h2o": ("h2o", {"block": 8, "heavy": 6, "recent": 5}),
    "h2o, shares": ("h2o", {"block": 8, "heavy": 0.2, "recent": 0.1}),
    "tova": ("tova", {"block": 8, "cache_size": 12}),
    "duo": ("duo", {"block": 8, "heads": "alternate", "sinks": 4, "recent": 10}),
    "cpu": ("cpu", {"block": 8, "window_blocks": 1}),
    "cpu, all on the GPU": ("cpu", {"block": 8, "window_blocks": 40}),
    "cpu, int8": ("cpu", {"block": 8, "window_blocks": 1, "host_dtype": "int8"}),
    "hgca": ("hgca", {"block": 8, "window_blocks": 2, "beta": 0}),
    "hgca, beta": ("hgca", {"block": 8, "window_blocks": 2, "beta": 1}),
    "hgca, int8": ("hgca", {"block": 8, "window_blocks": 2, "beta": 0, "host_dtype": "int8"}),
    "scout": ("scout", SCOUT),
    "scout, int8": ("scout", {**SCOUT, "budget": 512, "pool_blocks": 3, "recall_interval": 2, "host_dtype": "int8"}),
    "scout, later": ("scout", {**SCOUT, "pool_blocks": 5, "ahead_from": 2, "dense_layers": 1}),
    "hcattention, keys": ("hcattention", {"block": 8, "window_blocks": 1, "groups": 0, "tau": 1.0}),
    "hcattention": ("hcattention", CODED),
    "hcattention, sinks": ("hcattention", {**CODED, "sink_blocks": 2}),
    "hcattention, packed": ("hcattention", {**CODED, "block": 16, "tau": 0.9, "host_dtype": "int8", "code_bits": 13}),
    "hcattention, apart": (
        "hcattention",
        {"block": 8, "window_blocks": 1, "groups": 2, "cap": 9, "host_dtype": "int4", "centroids": 16},
    ),
    "infinigen": ("infinigen", {"block": 8, "alpha": 2.0, "budget": 12, "dense_layers": 1, "ahead_from": 1}),
    "infinigen, own norm": ("infinigen", {"block": 1, "budget": 12, "norm": "own", "count": "sequence"}),
    "pqcache": ("pqcache", {"block": 8, "window_blocks": 1, "sinks": 4, "compress": 0.3, "subbits": 4}),
    # with 0.8 a token of these steps weighs as much as it must, but for the last bit
    "auto": ("auto", {**AUTO, "quality": 0.82}),
    "auto, int8": ("auto", {**AUTO, "quality": 0.82, "host_dtype": "int8"}),
    "snapkv": ("snapkv", {"budget": 16, "window": 4, "kernel": 3}),
    "hcattention, no union": ("hcattention", {**CODED, "window_blocks": 2, "tail": "none", "union": False}),
    "hcattention, no value for the rest": (
        "hcattention",
        {**CODED, "window_blocks": 2, "tail": "zero", "union": False},
    ),
}
CASES = [
    *(("llama", name) for name in METHODS),
    # what a family has of its own: sliding windows, soft-capping, norms of heads, other sizes and positions
    *((family, "scout") for family in FAMILIES if family != "llama"),
    *(("gemma2", name) for name in ("full", "full, int8", "cpu", "hgca", "hcattention")),
    *(("gpt_oss", name) for name in ("full", "full, int4", "hgca", "hcattention", "auto", "auto, int8", "h2o")),
]
"""Each method with one family, each family with the method that has most to it; windows, caps and sinks with others."""


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "name"), CASES)
def test_captured_steps_equal_plain_ones(family: str, name: str, world: Any) -> None:
    """Batches of one to four, so with padding rows and without; steps with a far part and without."""
    method, params = METHODS[name]
    run = world(tiny(family, "cuda", torch.float32), method, **params)
    run.join(2, 6)
    run.steps(2)
    run.leave(2)
    run.join(2, 30)
    run.steps(3)
    run.join(0, 9)
    run.steps(12)
    run.join(3, 70)
    run.steps(20)
    run.leave(2)
    run.steps(5)
    run.join(1, 2)
    run.steps(40)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full", "full, int8", "full, int4", "cpu", "hgca", "scout, int8"])
def test_captured_steps_in_16_bits(name: str, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of 16-bit numbers, among them the products of several tokens. Nothing here is left to a border but
    a code of four bits: the last bit of a key decides between two that lie a fifteenth of its range apart."""
    from coattn.kernels.cuda import product
    from coattn.kernels.triton.launch import own_products

    made = []
    real = product.product
    monkeypatch.setattr(product, "product", lambda *args: made.append(args[0].shape) or real(*args))
    method, params = METHODS[name]
    run = world(tiny("qwen3", "cuda", torch.bfloat16), method, **params)
    run.rounding = 0.1 if "int4" in name else 0.05
    run.join(2, 30)
    run.join(0, 9)
    run.join(3, 70)
    run.steps(12)
    run.leave(2)
    run.steps(30)
    assert bool(made) == own_products()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["model", "int8"])
def test_captured_steps_of_auto_in_16_bits(form: str, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels on tensor cores, which 32-bit numbers and small heads never take."""
    from coattn.kernels.cuda import score_sketch

    scored = []
    real = score_sketch.score
    monkeypatch.setattr(score_sketch, "score", lambda *args: scored.append(args) or real(*args))
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    method, params = METHODS["auto"]
    params = {**params, "block": 32, "quality": 0.98, "code_bytes": 16}
    params["host_dtype"] = form
    run = world(model, method, length=1024, **params)
    run.spread = 0.06  # of `full` with these weights 0.040 at most, of 63 steps
    run.join(2, 300)
    run.steps(3)
    run.join(0, 90)
    run.join(3, 700)
    run.steps(40)
    run.leave(2)
    run.steps(20)
    assert scored
    reports = [runner.runtime.report(Step.of((0, 3), (149, 759), (1, 1))) for runner in (run.plain, run.captured)]
    wanted = [report["row_entries"] for report in reports]
    assert min(wanted) > 1, "something was fetched"
    assert max(wanted) < 2 * min(wanted) + 32


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["stall", "die", "throw"])
def test_a_lost_worker_is_an_error_and_then_over(fault: str, world: Any) -> None:
    run = world(random_model("tiny", torch.device("cuda"), torch.float32), "cpu", block=8)
    run.join(0, 40)
    run.steps(3)
    held = dict(run.ledger.held)
    extension.inject_fault(fault, 3.0)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    with pytest.raises(WorkerError):
        run.captured.decode([0], [1], [run.history[0]])
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) < 2000
    assert run.ledger.held == held
    run.steps(30)


@pytest.mark.gpu
def test_the_model_is_as_it_was(world: Any) -> None:
    model = random_model("tiny", torch.device("cuda"), torch.float32)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    ids = torch.randint(0, 256, (1, 20), device="cuda")
    with torch.no_grad():
        logits = model(ids).logits
    run = world(model, "full")
    run.join(0, 5)
    run.steps(2)
    run.close()
    run.close = lambda: None
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all("forward" not in module.__dict__ for module in model.modules())
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)
