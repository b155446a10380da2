"""Mass, drift and queries one layer ahead, against hand computations."""

from __future__ import annotations

import pytest
import torch
from tests.dense import dense
from tests.hf.families import FAMILIES, tiny

from coattn.tools.evaluate.windows import choose
from coattn.types import LayerShape
from coattn_lab.evaluate.attention import analyse
from coattn_lab.evaluate.locality import Drift, block_bound, block_mass, changed, entries_for, mass_of
from coattn_lab.evaluate.look import attention_weights

IDS = torch.randint(3, 160, (150,), generator=torch.Generator().manual_seed(4))


def test_entries_for_a_mass() -> None:
    weights = torch.tensor([[0.1, 0.6, 0.05, 0.25], [0.25, 0.25, 0.25, 0.25]])
    assert entries_for(weights, 0.6).tolist() == [1, 3]
    assert entries_for(weights, 0.84).tolist() == [2, 4]
    assert entries_for(weights, 1.0).tolist() == [4, 4]
    assert mass_of(weights, (0.25, 0.5, 1.0))[0].tolist() == pytest.approx([0.6, 0.85, 1.0])


def test_the_mass_of_a_block_is_summed_over_its_tokens_and_queries() -> None:
    weights = torch.tensor([[[0.1, 0.2, 0.3, 0.15, 0.25], [0.5, 0.1, 0.1, 0.1, 0.2]]])
    assert block_mass(weights, 1, 2)[0, 0].tolist() == pytest.approx([0.9, 0.65, 0.45])
    assert block_mass(weights, 2, 3)[0].tolist() == [pytest.approx([0.6, 0.4]), pytest.approx([0.7, 0.3])]


def test_the_bound_of_a_block_is_quests() -> None:
    torch.manual_seed(0)
    q, keys = torch.randn(1, 4, 8), torch.randn(1, 10, 2, 8)
    found = block_bound(q, keys, 4)
    for head in range(2):
        for block, (start, end) in enumerate(((0, 4), (4, 8), (8, 10))):
            part = keys[0, start:end, head]
            bound = sum(
                torch.maximum(x * part.amin(0), x * part.amax(0)).sum().item() for x in q[0, 2 * head : 2 * head + 2]
            )
            assert found[0, head, block].item() == pytest.approx(bound, rel=1e-5)


def test_the_change_rate_counts_new_blocks() -> None:
    before = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    assert changed(before, torch.tensor([[5.0, 1.0, 3.0, 4.0]]), 2).tolist() == [0.5]
    assert changed(before, torch.tensor([[0.0, 1.0, 3.0, 4.0, 9.0]]), 2).tolist() == [1.0]
    assert changed(before, torch.tensor([[2.0, 1.0, 3.0, 4.0]]), 4).tolist() == [0.0]


def test_drift_compares_neighbouring_steps_of_one_window() -> None:
    drift, keys = Drift(budget=2, block=1), torch.zeros(1, 4, 1, 2)
    for weights in ([0.4, 0.3, 0.2, 0.1], [0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]):
        drift.see(0, torch.zeros(1, 1, 2), keys, torch.tensor([[weights]]))
    assert drift.summary()["mass"] == {"mean": 0.5, "layers": [0.5]}
    drift.forget()
    drift.see(0, torch.zeros(1, 1, 2), keys, torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]))
    assert drift.summary()["mass"]["mean"] == 0.5


def test_weights_are_those_that_attention_uses() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    shape = LayerShape(4, 2, 8, torch.float32, torch.device("cpu"), sliding_window=6, softcap=2.0)
    weights = attention_weights(q, k[None], 0.3, shape)[0]
    out = torch.einsum("hn,nhd->hd", weights, v.repeat_interleave(2, 1))
    torch.testing.assert_close(out.double(), dense(q, k, v, 0.3, window=6, softcap=2.0)[0], atol=1e-6, rtol=1e-6)


def test_the_predicted_query_is_the_next_projection_of_this_input() -> None:
    """The faithful form and the paper's, computed by hand from hidden states of a plain forward pass."""
    model = tiny("llama")
    found = analyse(model, IDS[:41], choose(41, decode=1, prefill=40))["query_ahead"]
    with torch.no_grad():
        hidden = model.model(IDS[None, :41], output_hidden_states=True).hidden_states
        layer = model.model.layers[1]
        cos, sin = model.model.rotary_emb(hidden[0], torch.tensor([[40]]))

        def query(x: torch.Tensor, rope: bool) -> torch.Tensor:
            heads = layer.self_attn.q_proj(x[0, 40]).view(-1, layer.self_attn.head_dim)
            a, b = heads.chunk(2, -1)
            return heads * cos[0, 0] + torch.cat([-b, a], -1) * sin[0, 0] if rope else heads

        real = query(layer.input_layernorm(hidden[1]), True)
        for name, (norm, rope) in {"norm_rope": (1, 1), "norm": (1, 0), "rope": (0, 1), "neither": (0, 0)}.items():
            guess = query(layer.input_layernorm(hidden[0]) if norm else hidden[0], bool(rope))
            cosine = torch.cosine_similarity(guess, real, dim=-1).mean().item()
            assert found[name]["layers"][1] == pytest.approx(cosine, abs=1e-5), name
    assert found["norm_rope"]["layers"][0] is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_looked_at(family: str) -> None:
    model = tiny(family)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    result = analyse(model, IDS, choose(150, decode=3, prefill=60, stride=40), budget=16, block=4, batch=2)
    layers = model.config.num_hidden_layers
    assert len(result["locality"]["entries"]) == layers
    assert len(result["locality"]["entries"][0]) == model.config.num_attention_heads
    assert 1 <= result["locality"]["entries_mean"] <= 63
    assert len(result["drift"]["mass"]["layers"]) == layers
    assert all(0 <= x <= 1 for x in result["drift"]["mass"]["layers"] + result["drift"]["bound"]["layers"])
    assert all(-1 <= x <= 1 for x in result["query_ahead"]["norm_rope"]["layers"][1:])
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_a_layer_that_changes_nothing_predicts_exactly() -> None:
    model = tiny("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    found = analyse(model, IDS[:41], choose(41, decode=2, prefill=39))["query_ahead"]
    assert found["norm_rope"]["layers"][1:] == pytest.approx([1.0] * (model.config.num_hidden_layers - 1), abs=1e-6)
    assert found["norm"]["mean"] < 0.999
