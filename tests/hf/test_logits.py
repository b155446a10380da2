"""Logits from hidden states are the model's own, scaled and capped as its family does."""

from typing import Any

import pytest
import torch
import transformers
from tests.hf.families import FAMILIES, GROUPED, tiny
from transformers import AutoModelForCausalLM

from coattn.hf.logits import head

SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteConfig", {**GROUPED, "logits_scaling": 8.0}),
    "cohere": ("CohereConfig", {**GROUPED, "logit_scale": 0.0625}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
"""Families that scale their logits, and a mixture of experts, whether or not an engine runs them."""


def made(name: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, name)(**options)).eval()


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, *SCALED])
def test_the_head_is_the_models_own(family: str) -> None:
    model = tiny(family) if family in FAMILIES else made(*SCALED[family])
    ids = torch.randint(3, 160, (1, 9), generator=torch.Generator().manual_seed(1))
    before = dict(model.__dict__), {name: dict(each._modules) for name, each in model.named_modules()}
    want = model(ids, use_cache=False).logits[0]
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
    model.get_decoder().register_forward_pre_hook(lambda *_: 1 / 0)  # nobody calls the decoder
    assert torch.equal(head(model, hidden), want)
    torch.testing.assert_close(head(model, hidden[-1:]), want[-1:], atol=1e-5, rtol=1e-5)
    assert before == (model.__dict__, {name: dict(each._modules) for name, each in model.named_modules()})
