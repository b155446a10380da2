"""Queries that are made outside their attention module are the module's own."""

import inspect
from typing import Any

import pytest
import torch
from tests.hf.families import FAMILIES, tiny
from tests.hf.test_table import small
from torch import Tensor

import coattn
from coattn.errors import UnsupportedError
from coattn.hf.ahead import Ahead
from coattn.hf.kinds import layer_kinds
from coattn.hf.query import query_of
from coattn.kernels.rotate import rotate
from coattn.step.runtime import Runtime


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_family_says_how_its_query_is_made(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    ahead = Ahead(model)
    inputs: dict[int, Tensor] = {}
    calls: dict[int, dict[str, Any]] = {}
    real: dict[int, Tensor] = {}
    attend = Runtime.attend

    def spy(self: Runtime, running: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        real[layer] = q
        assert scale == pytest.approx(ahead.scales[layer])
        return attend(self, running, layer, q, k, v, scale)

    def keep(i: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            inputs[i], calls[i] = (args[0] if args else options["hidden_states"]), options

        return hook

    monkeypatch.setattr(Runtime, "attend", spy)
    for i, layer in enumerate(ahead.layers):
        layer.register_forward_pre_hook(keep(i), with_kwargs=True)
    with coattn.attach(model, "full"):
        model(torch.randint(3, 160, (2, 30), generator=torch.Generator().manual_seed(0)))
    for i, module in enumerate(ahead.modules):
        hidden = ahead.norms[i](inputs[i])
        own = query_of(module, ahead.shapes[i], hidden, calls[i].get("position_embeddings"))
        torch.testing.assert_close(own.transpose(1, 2).flatten(0, 1), real[i], atol=1e-6, rtol=1e-6)
        if i:
            # the layer's own input in place of that of the layer before, with the other layer's call
            guess = ahead.predict(i, inputs[i], calls[i - 1], i)
            torch.testing.assert_close(guess.transpose(1, 2).flatten(0, 1), real[i], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_family_says_how_positions_turn_its_queries(family: str) -> None:
    model = tiny(family)
    ahead, rotary = Ahead(model), getattr(model.get_decoder(), "rotary_emb", None)
    hidden = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))
    for i, (module, shape) in enumerate(zip(ahead.modules, ahead.shapes, strict=True)):
        if rotary is None:
            assert shape.rope is None
            continue
        kinds = "layer_type" in inspect.signature(rotary.forward).parameters
        kind = (model.config.layer_types[i],) if kinds else ()
        at = [query_of(module, shape, hidden, rotary(hidden, torch.tensor([[p]]), *kind)) for p in (5, 45)]
        frequencies = torch.tensor(shape.rope.frequencies, dtype=torch.float64)
        moved = rotate(at[0], torch.tensor(40), frequencies, shape.rope.interleaved)
        torch.testing.assert_close(moved, at[1], atol=1e-5, rtol=1e-5)
        assert (at[0] - at[1]).abs().max() > 0.01


@torch.no_grad()
def test_a_rotation_that_follows_the_length_is_known_as_such() -> None:
    model = tiny("llama")
    model.get_decoder().rotary_emb.rope_type = "dynamic"
    assert [shape.rope.frequencies for shape in Ahead(model).shapes if shape.rope] == [(), (), ()]


def test_layers_that_do_not_turn_their_queries_are_known() -> None:
    assert Ahead(small("smollm3", 0)).turns == {0: True, 1: True, 2: True, 3: False}


@pytest.mark.parametrize("family", ["phi", "hunyuan_v1_dense", "gpt2", "ministral3"])
def test_queries_that_are_made_otherwise_are_not_predicted(family: str) -> None:
    model = small(family, 0)
    if family == "ministral3":
        Ahead(model)  # what it scales its queries by is 1 at first
        model.config.rope_parameters["original_max_position_embeddings"] = 64
    said = layer_kinds(family, model.config.to_dict(), torch.device("cpu"))[-1]
    assert said["choice"] == "not predicted", "nor does `coattn doctor --model` say that they are"
    with pytest.raises(UnsupportedError, match="predicts queries one layer ahead"), coattn.attach(model, "scout"):
        pass


def test_doctor_says_how_experts_run() -> None:
    rows = layer_kinds("glm4_moe", tiny("glm4_moe").config.to_dict(), torch.device("cpu"))
    said = {row["part"]: row["choice"] for row in rows}
    assert said["2 layers of 8 experts, of which a token uses 2"] == "grouped_mm, layer by layer"
