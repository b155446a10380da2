"""Weights in DRAM: each staged layer is brought in before its turn, tokens stay the same, less lies on the GPU."""

import gc
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.run import coattn as command
from tests.engine.small import greedy, llm, prompt, small, tokenizer
from tests.hf.families import FAMILIES, tiny
from tests.tools.evaluate.tiny import save_model
from torch import nn

import coattn
from coattn.errors import ConfigError
from coattn.hf.architectures import describe_layers
from coattn.hf.fingerprint import _weights
from coattn.hf.fuse.siblings import Siblings, join
from coattn.hf.weights import SLOTS, StagedWeights, split
from coattn_lab.bench.random_model import random_model

CPU = torch.device("cpu")
SHARES = [0.0, 0.5, 0.8]


@contextmanager
def staged_weights(model: Any) -> Iterator[StagedWeights]:
    """Every layer's in DRAM, which two slots take turns to hold."""
    staged = StagedWeights(model, 0.0, CPU)
    yield staged
    staged.close()


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Of one forward call over a few tokens."""
    return model(torch.arange(5)[None] if ids is None else ids, use_cache=False).logits


def generate(model: Any, ids: torch.Tensor, count: int = 6) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same_and_is_as_it_was(family: str) -> None:
    model = tiny(family)
    assert model.config.num_hidden_layers > SLOTS, "every staged layer must have to wait for a slot at some time"
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.randint(3, 160, (2, 20), generator=torch.Generator().manual_seed(5))
    want = generate(model, ids)
    with staged_weights(model):
        assert torch.equal(generate(model, ids), want)
    assert torch.equal(generate(model, ids), want)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines stage weights where their model is, also without a GPU."""
    monkeypatch.setattr(
        "coattn.engine.model.stage", lambda loaded, share, _: StagedWeights(loaded.model, share, loaded.model.device)
    )


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("share", SHARES)
def test_the_engine_says_the_same(share: float) -> None:
    model = small(layers=7)
    prompts, count = [prompt(40), prompt(70)], greedy(8)
    given = {"max_batch": 4, "max_length": 256, "chunk": 32, "block": 8}
    for method in ("full", "cpu", "hgca"):
        with coattn.LLM((model, tokenizer()), method, **given) as engine:
            want = [output.token_ids for output in engine.generate(prompts, count)]
        with coattn.LLM((model, tokenizer()), method, weights_on_gpu=share, **given) as engine:
            assert [output.token_ids for output in engine.generate(prompts, count)] == want
            # a captured step between the layers of a prompt would take its slots
            assert engine.engine.chunk_policy.layers == 1


def beside_a_fault(model: Any, at: int | None, after: bool) -> tuple[tuple[int, ...], Any]:
    """One request decodes, another is read, and layer `at` of its prompt fails once -> the answers of both."""
    given = {"max_batch": 2, "max_length": 256, "chunk": 64, "block": 8, "weights_on_gpu": 0.3}
    faults = [] if at is None else [RuntimeError("a fault")]

    def fault(_layer: nn.Module, args: Any, options: Any, *_: Any) -> None:
        hidden = args[0] if args else options["hidden_states"]
        if hidden.shape[1] > 30 and faults:  # a prompt, not a step that is captured
            raise faults.pop()

    with coattn.LLM((model, tokenizer()), "full", **given) as engine:
        first = engine.submit(prompt(20), greedy(24, ignore_eos=True))
        while len(first.request.output) < 8:
            engine.step()
        layer = model.model.layers[at or 0]
        hook = (layer.register_forward_hook if after else layer.register_forward_pre_hook)(fault, with_kwargs=True)
        second = engine.submit(prompt(50), greedy(4, ignore_eos=True))
        found = first.result().token_ids, second.result()
        hook.remove()
        assert not faults
    return found


def test_a_step_brings_every_staged_layer_in_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for layers in (5, 6, 7):
        model = small(layers=layers)
        staged, seen = StagedWeights(model, 0.0, CPU), list[int]()

        def note(j: int, staged: StagedWeights = staged, seen: list[int] = seen) -> Any:
            def check(layer: nn.Module, *_: Any) -> None:
                seen.append(j)
                assert staged.held[j % SLOTS] == j
                for piece in staged._pieces[j]:
                    assert torch.equal(piece.parameter, piece.within(staged.host[j]))

            return check

        for j, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(note(j))
        copies: list[int] = []
        copy = staged._copy
        monkeypatch.setattr(staged, "_copy", lambda j, copy=copy, copies=copies: copies.append(j) or copy(j))
        for _ in range(2):
            copies.clear()
            logits(model)
            assert staged.held == [0, 1], "as the next step finds them"
            # two are there when the step begins, and again when it ends
            assert copies[: layers - SLOTS] == list(range(SLOTS, layers))
            assert sorted(copies) == list(range(layers))
        assert seen == [*range(layers)] * 2
        staged.close()


def test_after_a_step_that_failed_the_next_one_is_right() -> None:
    model = small(layers=6)
    want = logits(model)
    with staged_weights(model):
        hook = model.model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(model)
        hook.remove()
        assert torch.equal(logits(model), want)


def slots_hold_the_first(staged: StagedWeights) -> None:
    """What a captured step relies on: it has no copy for the first layers."""
    assert staged.held == [0, 1]
    for j in range(SLOTS):
        assert torch.equal(staged.slots[j][: staged.sizes[j]], staged.host[j])


@pytest.mark.parametrize("fault", [RuntimeError("a fault"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_whatever_ends_a_step_the_slots_hold_the_first_layers(fault: BaseException) -> None:
    def raises(*_: Any) -> None:
        raise fault

    model = small(layers=7).to(CPU)
    with staged_weights(model) as staged:
        for layer in model.model.layers:
            for register in (layer.register_forward_pre_hook, layer.register_forward_hook):
                hook = register(raises)
                with pytest.raises(type(fault)):
                    logits(model)
                hook.remove()
                slots_hold_the_first(staged)


def test_a_layer_called_by_itself_takes_a_slot_until_the_next_step() -> None:
    model = small(layers=5).to(CPU)
    with staged_weights(model) as staged:
        hook = model.model.layers[4].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.model.layers[4]()
        hook.remove()
        assert staged.held == [4, 1]
        logits(model)
        slots_hold_the_first(staged)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_may_run_inside_a_layer_of_another(fails: bool) -> None:
    """As decode steps do between the layers of a prompt: the outer layer finds its weights again."""
    model, other, handle = small(layers=7).to(CPU), torch.randint(0, 250, (1, 3)), list[Any]()
    want, inner = logits(model), logits(model, other)

    def run(*_: Any) -> None:
        handle.pop().remove()  # once
        if not fails:
            assert torch.equal(logits(model, other), inner)
            return
        fault = model.model.layers[5].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(model, other)
        fault.remove()

    for layer in model.model.layers:
        with staged_weights(model) as staged:
            # inside the layer: its projections have run, its output and its MLP have not
            handle.append(layer.self_attn.o_proj.register_forward_pre_hook(run))
            assert torch.equal(logits(model), want)
            assert not handle
            slots_hold_the_first(staged)


@pytest.mark.parametrize("share", [*SHARES, 1.0])
def test_bytes_are_those_of_the_split(share: float) -> None:
    model = small(layers=10)
    whole = sum(p.nbytes for p in model.parameters())
    found = split(model, share)
    each = sum(p.nbytes for p in model.model.layers[0].parameters())
    stay = max(0, int(share * 10) - SLOTS)
    assert len(found.staged) == (0 if share == 1 else 10 - stay)
    assert found.gpu_bytes == whole - 10 * each + (10 if share == 1 else stay + SLOTS) * each
    assert found.host_bytes == len(found.staged) * each
    gaps = [b - a for a, b in zip(found.staged, found.staged[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1, "spread evenly"
    staged = StagedWeights(model, share, CPU)
    assert staged.report()["weights_moved"] == found.host_bytes
    # gaps between runs of parameters are at most 255 bytes each
    own = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert found.gpu_bytes <= sum(own.values()) < found.gpu_bytes + 10 * 9 * 256
    staged.close()


def test_projections_that_are_fused_lie_side_by_side_and_take_no_memory() -> None:
    model = small(layers=5)
    staged = StagedWeights(model, 0.0, CPU)
    attention = model.model.layers[3].self_attn
    members = [attention.q_proj, attention.k_proj, attention.v_proj]
    siblings = Siblings(members)
    assert not siblings.joined
    assert siblings.weight.data_ptr() == attention.q_proj.weight.data_ptr()
    assert torch.equal(siblings.weight, torch.cat([m.weight for m in members]))
    siblings.part()
    assert attention.k_proj.weight.untyped_storage().data_ptr() == staged.slots.untyped_storage().data_ptr()
    staged.close()
    apart, taken = join([torch.ones(2, 3), torch.zeros(1, 3)])
    assert taken
    assert apart.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]


def test_layers_are_told_apart_by_their_own_weights_wherever_they_lie() -> None:
    model = small(layers=6)
    want = [shape.mark for shape in describe_layers(model)]
    with staged_weights(model):
        assert [shape.mark for shape in describe_layers(model)] == want


def test_the_fingerprint_is_the_same_before_during_and_after() -> None:
    model = small(layers=6).to(CPU)
    want, found = _weights(model), []
    for share in (0.0, 0.5):
        staged = StagedWeights(model, share, CPU)
        found.append(_weights(model))
        hook = model.model.layers[3].register_forward_pre_hook(lambda *_: found.append(_weights(model)))
        logits(model)
        hook.remove()
        staged.close()
        found.append(_weights(model))
    assert found == [want] * 6


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("shares", [(None, 0.0), (0.0, None), (0.0, 0.8)])
def test_sessions_go_on_wherever_the_weights_lie(shares: tuple[float | None, ...], tmp_path: Path) -> None:
    said, answers = prompt(20), []
    for share in shares:
        given = {"max_batch": 1, "max_length": 128, "block": 8, "session_dir": tmp_path, "weights_on_gpu": share}
        with coattn.LLM((small(layers=5), tokenizer()), "full", **given) as engine:
            session = engine.session("talk")
            if not session.tokens:
                session.ask(said, greedy(4))
                session.save()
            turn = session.ask(prompt(3), greedy(4))
            assert turn.cached_tokens == 20 + 3
            answers.append(turn.token_ids)
    assert answers[0] == answers[1]


def test_without_a_gpu_it_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with caplog.at_level(logging.WARNING, "coattn"), llm(weights_on_gpu=0.5) as engine:
        assert "weights_moved" not in engine.report()
    assert [r.message for r in caplog.records] == ["weights_on_gpu has no effect without a GPU."]


def test_refused_where_queries_are_predicted_and_for_bad_shares() -> None:
    for method in ("scout", "infinigen"):
        with pytest.raises(ConfigError, match="makes a layer's query one layer ahead"):
            llm(method, weights_on_gpu=0.5)
    for share in (-0.1, 1.5, "half"):
        with pytest.raises(ConfigError, match="weights_on_gpu"):
            llm(weights_on_gpu=share)


def test_the_plan_counts_them() -> None:
    plan = ("plan", "llama-3-8b", "--context", "4096", "--gpu", "12GiB", "--dram", "64GiB", "--json")
    whole = json.loads(command(*plan).stdout)
    done = command(*plan, "--weights-on-gpu", "0.5")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    layers = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) * 2
    for whole_row, row in zip(whole["methods"], found["methods"], strict=True):
        assert whole_row["weights"] == whole["weight_bytes"] == found["weight_bytes"]
        assert row["weights"] == whole["weight_bytes"] - layers // 2
        assert row["dram"] == whole_row["dram"] + layers // 2
        assert not whole_row["fits"]
    assert found["methods"][0]["fits"], "full"


def test_the_command_line_takes_a_share(tmp_path: Any) -> None:
    model = save_model(tmp_path / "model")
    done = command("generate", "one two", "--model", model, "--weights-on-gpu", "0.5", "--max-new-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert command("generate", "a", "--model", model, "--weights-on-gpu", "2").returncode == 2


@pytest.mark.gpu
def test_captured_steps_after_a_prompt_that_failed_midway_say_the_same() -> None:
    model = small(layers=8)
    want, undisturbed = beside_a_fault(model, None, False)
    for at in range(8):
        for after in (False, True):
            found, other = beside_a_fault(model, at, after)
            assert found == want
            assert other.finish_reason == "error" or other.token_ids == undisturbed.token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "offload", "cpu", "hgca"])
def test_captured_steps_and_prompts_say_the_same_with_less_gpu_memory(method: str) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    weights = {name: x.cpu() for name, x in random_model("smollm2-135m", device, torch.float32).state_dict().items()}
    tokens, peaks = [], []
    for share in (None, 0.25):
        gc.collect()  # an engine and its model know each other: they are freed when Python looks for such rings
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = random_model("smollm2-135m", device if share is None else CPU, torch.float32)
        model.load_state_dict(weights)
        torch.cuda.reset_peak_memory_stats()
        given = {"max_batch": 2, "max_length": 512, "gpu_kv": "64MiB", "chunk": 128, "weights_on_gpu": share}
        with coattn.LLM((model, None), method, **given) as engine:
            prompts = [torch.arange(300).tolist(), torch.arange(40, 90).tolist()]
            outputs = engine.generate(prompts, greedy(24, ignore_eos=True))
            tokens.append([output.token_ids for output in outputs])
            assert engine.report()["captured"]
            peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, engine
    assert tokens[0] == tokens[1]
    assert peaks[1] < 0.75 * peaks[0]
