"""InfiniGen: partial keys say one layer ahead which tokens are fetched; its rule beside a slow re-statement."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.cli.run import coattn as command
from tests.engine.small import small
from tests.hf.families import tiny
from tests.methods.fetched import DIM, GROUP, HEADS, KV_HEADS, LAYERS, SCALE, World
from tests.tools.evaluate.tiny import save_model
from torch import Tensor

import coattn
from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError, MethodError
from coattn.hf.ahead import Ahead
from coattn.hf.architectures import describe_layers
from coattn.kernels.quantise.layer_file import TextOrigin
from coattn.kernels.quantise.skew import SKEWS, skew_of
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.probe import Probe
from coattn.step.runtime import Runtime
from coattn.tools.calibrate.skews import read_skews
from coattn.types import Phase, Step

ROW = METHODS["infinigen"]
SMALL = {"budget": 12, "alpha": 1.5, "dense_layers": 1, "ahead_from": 1, "partial": 0.4}


def slow_columns(q: Tensor, count: int) -> list[Tensor]:
    """Of each KV head, `[d, count]`: singular vectors of the group's queries in which these are largest."""
    found = []
    for head in range(KV_HEADS):
        stacked = torch.cat([q[:, GROUP * head + i].double() for i in range(GROUP)])
        vectors = torch.linalg.svd(stacked, full_matrices=True).Vh.T
        size = (stacked @ vectors).abs().sum(0)
        best = sorted(range(DIM), key=lambda c: -float(size[c]))[:count]
        found.append(vectors[:, best])
    return found


def slow(
    world: World, layer: int, columns: list[Tensor], alpha: float, budget: int, alone: bool
) -> list[list[set[int]]]:
    """By sequence and KV head: the positions that the rule takes, wherever they lie. Number by number."""
    scores, counts = [], []
    for slot, length in enumerate(world.lengths):
        q, k = world.guessed[layer][slot].double(), world.kept[slot][layer][1].double()
        own = []
        for head in range(HEADS):
            a = columns[head // GROUP]
            own.append([float((q[head] @ a) @ (k[p, head // GROUP] @ a)) * SCALE for p in range(length - 1)])
        below = [[s - max(each) for s in each] for each in own]
        groups = [below[GROUP * kv : GROUP * (kv + 1)] for kv in range(KV_HEADS)]
        best = [[max(each[p] for each in group) for p in range(length - 1)] for group in groups]
        scores.append(best)
        counts.append([sum(s > -alpha for s in each) for each in best])
    found = []
    for slot, own in enumerate(scores):
        mine = counts[slot] if alone else [c for each in counts for c in each]
        n, heads = min(int(sum(mine) / len(mine)), budget), []
        for best in own:
            heads.append({*sorted(range(len(best)), key=lambda p, best=best: -best[p])[:n]})
        found.append(heads)
    return found


def check(world: World, layer: int, want: list[list[set[int]]]) -> int:
    total = 0
    for slot, heads in enumerate(want):
        edge = world.window(slot)
        there = [sorted(p for p in own if p < edge) for own in heads]
        assert world.picked(slot, layer) == there
        total += sum(map(len, there))
    return total


@pytest.mark.parametrize("count", ["batch", "sequence"])
@pytest.mark.parametrize(("block", "window"), [(1, 1), (8, 2)])
def test_takes_what_the_slow_rule_takes(block: int, window: int, count: str) -> None:
    world = World(ROW, **SMALL, block=block, window_blocks=window, count=count)
    world.step(90, 41)
    first = [torch.cat([world.kept[slot][layer][0] for slot in (0, 1)]) for layer in range(LAYERS)]
    columns = [slow_columns(q, int(DIM * 0.4)) for q in first]
    total = 0
    for _ in range(12):
        outs = world.step(1, 1, guess=lambda q: q.roll(1, 0) + 0.3)
        for layer in range(1, LAYERS):
            want = slow(world, layer, columns[layer], 1.5, 12, count == "sequence")
            total += check(world, layer, want)
            for slot in (0, 1):
                torch.testing.assert_close(
                    outs[layer][slot].double(), world.attended(slot, layer), atol=1e-5, rtol=1e-4
                )
        assert world.picked(0, 0) == [list(range(world.window(0)))] * KV_HEADS, "the first layer is dense"
    assert total > 100, "much of it lies in DRAM"


def test_bytes_on_the_gpu_are_those_of_window_skew_and_partial_keys() -> None:
    world = World(ROW, **SMALL, block=8, window_blocks=2)
    world.step(90, 41)
    columns, tokens = int(DIM * 0.4), 88 + 40
    window = 2 * 2 * 8 * KV_HEADS * 2 * DIM * 4
    basis = KV_HEADS * DIM * columns * 4
    blocks = world.runtime.groups[0].cache.host.memory.capacity  # type: ignore[union-attr]
    assert blocks * 8 >= tokens
    partial = (blocks + 1) * 8 * KV_HEADS * columns * 4
    staging = sum(
        world.runtime.groups[0].executor.staging.unit * n for n in [world.runtime.groups[0].executor.staging.blocks]
    )  # type: ignore[attr-defined]
    ahead = 2 * 2 * 12 * KV_HEADS * 2 * DIM * 4  # two halves of 12 tokens for each sequence
    assert world.ledger.held["gpu"] == LAYERS * (window + basis + partial) + staging + ahead
    held = world.runtime.groups[0].index
    assert sum(x.nbytes for x in held.basis.values()) == LAYERS * basis  # type: ignore[attr-defined]
    world.runtime.release()
    assert world.ledger.held["gpu"] == 0


def test_the_best_columns_hold_more_than_as_many_others() -> None:
    q = torch.randn(200, HEADS, DIM) * torch.linspace(0.1, 3, DIM)
    skew = skew_of(q, KV_HEADS)
    same = skew.matrix @ skew.matrix.transpose(1, 2)
    torch.testing.assert_close(same, torch.eye(DIM).expand_as(same), atol=1e-5, rtol=0)
    some, all_of = skew.columns(4), q.view(200, KV_HEADS, GROUP, DIM)
    inside = torch.einsum("thgd,hdc->thgc", all_of, some).square().sum() / all_of.square().sum()
    assert 0.5 < inside < 0.9 > 4 / DIM


def test_a_file_is_read_back_and_another_models_is_refused(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "skew"
    found = read_skews(model, torch.arange(60) % 250)
    shapes = describe_layers(model)
    marks = tuple(shape.mark for shape in shapes)
    SKEWS.save(path, dict(enumerate(each for each, _ in found)), TextOrigin("small", "t", "0", 60, marks))
    for i, each in SKEWS.load(str(path), dict(enumerate(shapes))).items():
        assert torch.equal(each.matrix.cpu(), found[i][0].matrix)
        assert torch.equal(each.order.cpu(), found[i][0].order)
    for other in (describe_layers(small(seed=1)), [replace(s, head_dim=16) for s in shapes], [*shapes, *shapes]):
        with pytest.raises(ConfigError, match=r"was made for small .2 layers., not for the model in use"):
            SKEWS.load(str(path), dict(enumerate(other)))
    with pytest.raises(ConfigError, match="There is no skew file"):
        compose(ROW, skew=str(tmp_path / "absent"))
    (tmp_path / "text").write_text("not a skew")
    with pytest.raises(ConfigError, match="cannot be read as a skew"):
        SKEWS.read_origin(str(tmp_path / "text"))


def test_the_command_writes_a_file_that_the_method_takes(tmp_path: Path) -> None:
    model, text, target = save_model(tmp_path / "model"), tmp_path / "text", tmp_path / "skew"
    text.write_text("How much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 8)
    made = ("--text", str(text), "--out", str(target), "--length", "128")
    done = command("calibrate", "infinigen", "--model", model, *made, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == 128
    assert all(0 < share <= 1 for share in found["kept"])
    assert SKEWS.read_origin(str(target)).text == "text"
    used = ("--method", "infinigen", "--set", f"skew={target}", "--max-new-tokens", "3")
    done = command("generate", "one two", "--model", model, *used)
    assert done.returncode == 0, done.stderr
    assert "No skew was given" not in done.stderr


def test_without_a_file_the_first_prompt_makes_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    world = World(ROW, **SMALL, block=8)
    world.step(40, 41)
    assert [r.message for r in caplog.records] == [
        "No skew was given: making one from the first 81 tokens of this prompt. `coattn calibrate infinigen` makes a "
        "better one, once."
    ]
    before = world.runtime.groups[0].index.basis[1].clone()  # type: ignore[attr-defined]
    world.step(30, 30)
    assert torch.equal(before, world.runtime.groups[0].index.basis[1])  # type: ignore[attr-defined]


def test_predicted_under_the_norm_of_the_layer_before() -> None:
    """As published: what layer i attends with, times W_q of layer i + 1."""
    model = tiny("llama")
    ahead, hidden = Ahead(model), torch.randn(1, 3, model.config.hidden_size)
    with torch.no_grad():
        for norm in ahead.norms:
            norm.weight.copy_(torch.rand_like(norm.weight) + 0.5)  # type: ignore[operator, arg-type, union-attr]
        rope = model.model.rotary_emb(hidden, torch.arange(3)[None])
        options = {"position_embeddings": rope, "position_ids": torch.arange(3)[None]}
        own, before = ahead.predict(1, hidden, options, 1), ahead.predict(1, hidden, options, 0)
        module = ahead.modules[1]
        normed = ahead.norms[0](hidden)
        want = module.q_proj(normed).view(1, 3, -1, ahead.shapes[1].head_dim).transpose(1, 2)  # type: ignore[operator]
        cos, sin = (x[:, None] for x in rope)
        half = want.shape[-1] // 2
        want = want * cos + torch.cat([-want[..., half:], want[..., :half]], -1) * sin
    torch.testing.assert_close(before, want)
    assert not torch.allclose(own, before, atol=1e-3)


def test_the_row_asks_for_it() -> None:
    layers = World(ROW).runtime.layers
    for norm, want in (("before", 1), ("own", 2)):
        assert Runtime(layers, compose(ROW, norm=norm), Ledger(), 1, None).norm_layer(2) == want


def test_runs_under_attach_with_predicted_queries() -> None:
    model = tiny("llama")
    ids = torch.randint(0, model.config.vocab_size, (1, 70))
    with torch.no_grad():
        plain = model.generate(ids, max_new_tokens=6, do_sample=False)
        with coattn.attach(model, ROW, block=8, alpha=1e6, budget=1000, count="sequence"):
            assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), plain)
        with coattn.attach(model, ROW, block=8, budget=4, dense_layers=0, ahead_from=1) as attachment:
            model.generate(ids, max_new_tokens=6, do_sample=False)
            assert attachment.report()["method"] == "infinigen"


def test_a_place_that_does_not_fetch_is_refused() -> None:
    with pytest.raises(MethodError, match="needs the GPU as the executor, over PCIe"):
        compose(replace(ROW, executor="cpu"))


class Poisoned(Probe):
    """When a layer has attended, what the next one reads in DRAM means nothing any more, until the step is over."""

    def __init__(self, world: World) -> None:
        self.world, self.kept = world, dict[int, Tensor]()

    def output(self, step: Step, layer: int, out: Tensor) -> None:
        if step.phase is Phase.DECODE and layer + 1 < LAYERS:
            memory = self.world.runtime.groups[0].cache.dram.memory[layer + 1]
            self.kept[layer + 1] = memory.clone()
            memory.fill_(torch.nan)

    def commit(self, step: Step) -> None:
        for layer, own in self.kept.items():
            memory = self.world.runtime.groups[0].cache.dram.memory[layer]
            memory.copy_(own.where(memory.isnan(), memory))  # but what the step has written there
        self.kept.clear()


@pytest.mark.parametrize("fixed", [False, True])
def test_a_layer_attends_to_what_came_behind_the_layer_before(fixed: bool) -> None:
    """Blocks in DRAM lose their numbers right before the layer's turn: only what is on the GPU by then counts."""
    worlds = [World(ROW, **SMALL, fixed=fixed, block=8) for _ in range(2)]
    for world in worlds:
        world.step(90, 41)
    worlds[1].runtime.probes.append(Poisoned(worlds[1]))
    for _ in range(9):
        plain, poisoned = (world.step(1, 1, guess=lambda q: q.roll(1, 0) + 0.3) for world in worlds)
        for one, other in zip(plain, poisoned, strict=True):
            torch.testing.assert_close(other, one, atol=1e-6, rtol=1e-5)
    assert all(world.picked(0, 2)[0] for world in worlds), "tokens in DRAM are attended"


def test_without_the_prefetch_the_same_numbers_are_read_in_dram() -> None:
    worlds = [World(row, **SMALL, block=8) for row in (ROW, replace(ROW, executor="pull", schedule="layer_ahead"))]
    for world in worlds:
        world.step(90, 41)
    for _ in range(5):
        ahead, there = (world.step(1, 1, guess=lambda q: q.roll(1, 0) + 0.3) for world in worlds)
        for one, other in zip(ahead, there, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    worlds[1].runtime.probes.append(Poisoned(worlds[1]))
    assert any(torch.isnan(out).any() for out in worlds[1].step(1, 1)), "the poison is seen"


def test_bytes_that_come_ahead_are_those_of_the_tokens_taken() -> None:
    world = World(ROW, **SMALL, block=8)
    world.step(90, 41)
    world.step(1, 1)
    step = Step.of((0, 1), tuple(n - 1 for n in world.lengths), (1, 1))
    tokens = sum(len(own) for slot in (0, 1) for layer in (1, 2) for own in world.picked(slot, layer))
    assert tokens > 20
    assert world.runtime.report(step)["prefetched_bytes"] == tokens * 2 * DIM * 4
    world.runtime.release()
    assert world.ledger.held["gpu"] == 0
