"""Logits from hidden states are the model's own, scaled and capped as its family does."""

import pytest
import torch
from tests.hf.families import FAMILIES, tiny
from tests.hf.test_table import small

from coattn.hf.logits import head


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, "granite", "cohere", "qwen3_moe"])
def test_the_head_is_the_models_own(family: str) -> None:
    model = tiny(family) if family in FAMILIES else small(family, 0)
    ids = torch.randint(3, 160, (1, 9), generator=torch.Generator().manual_seed(1))
    before = dict(model.__dict__), {name: dict(each._modules) for name, each in model.named_modules()}
    want = model(ids, use_cache=False).logits[0]
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
    model.get_decoder().register_forward_pre_hook(lambda *_: 1 / 0)  # nobody calls the decoder
    assert torch.equal(head(model, hidden), want)
    torch.testing.assert_close(head(model, hidden[-1:]), want[-1:], atol=1e-5, rtol=1e-5)
    assert before == (model.__dict__, {name: dict(each._modules) for name, each in model.named_modules()})
