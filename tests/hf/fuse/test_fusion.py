"""Fused forms of whole models, under Triton's interpreter without a GPU: the same numbers, and the model as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.hf.families import FAMILIES, tiny
from tests.hf.quantised_folders import write

from coattn.cache.ledger import Ledger
from coattn.engine.runner.runner import Runner
from coattn.hf.ahead import Ahead
from coattn.hf.experts import COPYING, expert_modules, implemented
from coattn.hf.forward import Session
from coattn.hf.fuse.fusion import Fusion, _Pretend
from coattn.hf.load import load
from coattn.hf.waits import waits
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.step.runtime import Runtime

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SINGLE = {"opt", "gpt_neox", "gpt_oss"}
"""Families whose layers have no fused form."""
EXPERTS = {"qwen3_moe": (3, 3), "glm4_moe": (2, 2), "mixtral": (3, 3), "gpt_oss": (0, 3)}
"""Layers whose experts and whose routers have forms."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_gives_the_same_numbers(family: str) -> None:
    model = tiny(family, DEVICE)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    ids, positions = torch.randint(3, 160, (5,), device=DEVICE), torch.arange(5, device=DEVICE)
    with Session(model) as session:
        want = session.hidden(_Pretend(), None, ids, positions)
        fusion = Fusion(session)
        assert fusion.summary.get("layers", 0) == (0 if family in SINGLE else 3)
        assert tuple(fusion.summary.get(kind, 0) for kind in ("experts", "routers")) == EXPERTS.get(family, (0, 0))
        loops = family == "gpt_oss" and DEVICE.type == "cpu"  # on a GPU its experts are a grouped product
        assert (fusion.waits() is None) != loops
        with fusion.active(), torch.no_grad():
            got = session.hidden(_Pretend(), None, ids, positions)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        fusion.close()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_prompts_are_read_in_fused_forms(family: str) -> None:
    """A prompt in two chunks, fused or not: the same logits, and the modules are as they were afterwards."""
    model = tiny(family, DEVICE)
    ids = torch.randint(3, 160, (17,)).tolist()
    with Session(model) as session:
        runtime = Runtime(session.layers, compose(find_method("full"), block=8), Ledger(), 1, 64, fixed=True)
        runner, found, entered = Runner(session, runtime, 1), [], []
        fusion = Fusion(session)

        @contextmanager
        def around() -> Iterator[None]:
            with fusion.active():
                entered.append(True)
                yield

        for fused in (False, True):
            if fused:
                runner.around = around
            runner.extend(0, ids[:12], 0, False)
            logits = runner.extend(0, ids[12:], 12, True)
            found.append(logits.clone())
            runner.runtime.truncate(0, len(ids), 0)
            assert all("forward" not in module.__dict__ for module in model.modules())
        torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
        assert len(entered) == 2, "once for each chunk"
        fusion.close()
        runtime.release()


def test_a_call_that_waits_for_a_gpu_is_not_captured() -> None:
    model = tiny("llama", DEVICE)
    hook = model.model.norm.register_forward_hook(lambda *call: call[-1] * (call[-1].sum().item() < 1e30))
    with Session(model) as session:
        fusion = Fusion(session)
        assert "waits for the GPU at aten._local_scalar_dense" in str(fusion.waits())
        hook.remove()
        assert fusion.waits() is None
        fusion.close()


def test_a_loop_over_experts_waits() -> None:
    model = tiny("mixtral", DEVICE)
    module, x = model.model.layers[0].mlp, torch.randn(1, 2, 64, device=DEVICE)
    model.set_experts_implementation("eager")
    assert waits(lambda: module(x)) is not None
    with implemented(expert_modules(model), COPYING):
        assert waits(lambda: module(x)) is None
    assert model.config._experts_implementation == "eager"
    assert "aten.index" in str(waits(lambda: x[x > 0]))


@pytest.mark.parametrize(("scheme", "family"), [("fp8 blocks", "qwen3_moe"), ("int8", "mixtral")])
def test_layers_whose_experts_are_packed_are_fused(scheme: str, family: str, tmp_path: Path) -> None:
    write(tmp_path, scheme, family)
    model = load(tmp_path, dtype="float32", device=DEVICE).model
    ids, positions = torch.randint(3, 160, (5,), device=DEVICE), torch.arange(5, device=DEVICE)
    with Session(model) as session:
        want = session.hidden(_Pretend(), None, ids, positions)
        fusion = Fusion(session)
        assert (fusion.summary.get("layers"), fusion.summary.get("routers")) == (3, 3)
        with fusion.active(), torch.no_grad():
            got = session.hidden(_Pretend(), None, ids, positions)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        fusion.close()


@pytest.mark.parametrize("scheme", ["awq", "int8", "fp8 blocks"])
@torch.no_grad()
def test_queries_are_predicted_with_packed_weights(scheme: str, tmp_path: Path) -> None:
    """In a fused step of `scout` they are rows of the one matrix that q, k and v are."""
    write(tmp_path, scheme)
    model = load(tmp_path, dtype="float32", device=DEVICE).model
    with Session(model) as session:
        ahead, x = Ahead(model), torch.randn(1, 5, 64, device=DEVICE)
        at = torch.arange(5, device=DEVICE)[None]
        call = {"position_ids": at, "position_embeddings": model.model.rotary_emb(x, at)}
        want = [ahead.predict(layer, x, call, layer - 1) for layer in (1, 2)]
        fusion = Fusion(session)
        with fusion.active():
            assert all(hasattr(layer.forward, "query") for layer in ahead.layers)
            got = [ahead.predict(layer, x, call, layer - 1) for layer in (1, 2)]
        fusion.close()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
