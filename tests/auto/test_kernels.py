"""The kernels that `auto` has compiled before a step are those that steps ask for."""

from typing import Any

import pytest
import torch
from tests.engine.small import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import coattn
from coattn.engine.runner.rehearse import rehearse
from coattn.kernels.cuda import score_sketch as scoring


class AskedError(Exception):
    """For a kernel of this form."""


@pytest.mark.parametrize(("heads", "d"), [(8, 64), (32, 64), (4, 128)])
def test_steps_ask_for_what_was_compiled(heads: int, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=2, head_dim=d, max_position_embeddings=2048, eos_token_id=256, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()

    def module(*form: Any) -> None:
        raise AskedError(form[:2])

    with coattn.LLM((model, tokenizer()), "auto", max_batch=3, max_length=1024) as engine:
        [group] = engine.runner.runtime.groups
        forms = group.index.kernels()  # type: ignore[attr-defined]
        assert {file for file, _ in forms} == {
            "score_sketch.cu", "attend_pool.cu", "renew_pool.cu", "bound_scores.cu"
        }  # fmt: skip
        monkeypatch.setattr(scoring, "available", lambda device: True)
        monkeypatch.setattr(scoring, "module", module)
        with pytest.raises(AskedError) as asked:
            rehearse(engine.runner, engine.max_length, 2048)
        assert asked.value.args[0] in forms
