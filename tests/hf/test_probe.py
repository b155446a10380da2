"""What a call of a model's decoder shows of its attention, and what is refused."""

import logging
from typing import Any

import pytest
import torch
import transformers
from tests.hf.families import COMMON, GROUPED, tiny
from tests.hf.test_table import small
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import coattn
from coattn.errors import UnsupportedError
from coattn.hf.architectures import attention_modules, describe_layers
from coattn.hf.families import FAMILIES, note_family, refuse_family
from coattn.hf.probe import NAME, look_at


def test_layers_are_as_their_call_shows() -> None:
    gemma, mistral = tiny("gemma2"), tiny("mistral_sliding")
    assert [each.sliding_window for each in look_at(gemma)] == [19, None, 19]
    assert {(each.q_heads, each.kv_heads, each.head_dim, each.softcap) for each in look_at(gemma)} == {(4, 2, 32, 5.0)}
    assert {each.sliding_window for each in look_at(mistral)} == {23}
    assert [each.scale for each in look_at(tiny("opt"))] == [1.0] * 3, "its queries are scaled already"
    assert [(each.name, each.layer) for each in look_at(tiny("gpt_neox"))][1] == ("layers.1.attention", "layers.1")
    assert NAME not in ALL_ATTENTION_FUNCTIONS
    gemma.config.sliding_window = 7
    assert [each.sliding_window for each in look_at(gemma)] == [7, None, 7], "a config that changed is looked at again"
    with torch.device("meta"):
        assert look_at(transformers.MistralForCausalLM(mistral.config)) == look_at(mistral), "no weights are needed"


def test_a_mask_tells_the_window_where_the_attention_is_not_told() -> None:
    assert {each.sliding_window for each in look_at(small("phimoe", 0))} == {16}


def made(name: str, options: dict[str, Any]) -> PreTrainedModel:
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**options)
    )
    return model.eval()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "Bloom",
            {"vocab_size": 50, "hidden_size": 32, "n_layer": 1, "n_head": 2},
            "'bloom' attend .* in 0 of 1 layers",
        ),
        (
            "GPTJ",
            {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8},
            "'gptj' attend .* in 0 of 2 layers",
        ),
        ("DiffLlama", GROUPED, "family 'diffllama' attends twice"),
        ("Doge", GROUPED, "mask that is neither causal nor a sliding window"),
        ("Roberta", {**COMMON, "is_decoder": False}, "mask that is neither causal nor a sliding window"),
    ],
)
def test_attention_of_another_kind_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said), coattn.attach(made(name, options), "full"):
        pass


def test_sinks_are_a_parameter_of_each_head() -> None:
    model = small("gpt_oss", 0)
    assert {seen.sinks for seen in look_at(model)} == {"sinks"}
    kept = [shape.sink_logits for shape in describe_layers(model)]
    assert all(torch.equal(own, module.sinks) for own, module in zip(kept, attention_modules(model), strict=True))
    assert {seen.sinks for seen in look_at(small("llama", 0))} == {None}


@pytest.mark.parametrize(
    ("family", "reason"),
    {
        **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "longcat_flash"), "MLA"),
        **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"), "an indexer"),
        **dict.fromkeys(("mimo_v2_flash",), "values of another size"),
        **dict.fromkeys(("mamba2", "falcon_mamba"), "no attention"),
        **dict.fromkeys(("bart", "marian"), "an encoder with"),
        "gemma3n_text": "share keys",
        "llama4_text": "'chunked_attention'",
    }.items(),
)
def test_a_config_alone_is_refused_with_the_reason(family: str, reason: str) -> None:
    refused = refuse_family(AutoConfig.for_model(family).to_dict())
    assert refused is not None
    assert reason in str(refused)


def test_a_model_that_names_no_decoder_is_refused() -> None:
    model = made("ModernBertDecoder", COMMON)
    with pytest.raises(UnsupportedError, match="which of its modules is the decoder: it names a Linear"):
        coattn.attach(model, "full").__enter__()


def test_a_family_that_was_not_tested_runs_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FAMILIES, "biogpt")
    note_family.cache_clear()
    model = made("BioGpt", COMMON)
    with caplog.at_level(logging.WARNING, "coattn.hf"):
        for _ in range(2):
            with coattn.attach(model, "cpu"):
                model(torch.arange(3, 20)[None])
        with coattn.attach(tiny("llama"), "full"):
            pass
    assert [said for said in caplog.messages if "not been tested" in said] == [caplog.messages[0]]
    assert "'biogpt'" in caplog.messages[0]
