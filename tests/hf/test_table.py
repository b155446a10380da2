"""Every family in the table of docs/families.md gives Transformers' own greedy tokens, under `attach` and `LLM`.

`python -m tests.hf.test_table [FAMILY ...]` prints its rows.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import coattn
from coattn.errors import UnsupportedError
from coattn.hf.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
ROWS = ("full", "cpu", "auto")
LENGTHS, NEW, SEEDS = (40, 33), 12, 20
SAMPLE = ("qwen3_moe", "glm4_moe", "granite", "cohere2", "olmo2", "smollm3", "gpt_oss", "qwen3_5_text", "nemotron_h")
"""Families of a run that is not whole: experts, scaled logits, no rotation, late norms, sinks, states."""
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 160),
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("moe_num_shared_experts", "moe_layer_start_index", "moe_layer_interval"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "query_pre_attn_scalar"), 32),
    **dict.fromkeys(("head_dim", "sliding_window"), 16),
    "max_position_embeddings": 512,
    "moe_layer_end_index": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""Of every config, those keys that it has."""
NOT_ON_OLDEST = ("aria_text", "beam", "flint", "internlm3", "iquestcoder", "kolibri1")
"""Families that do not run with Transformers 5.17, the oldest that is allowed."""
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
}
MORE: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"], **MAMBA},
    "bamba": {"attn_layer_indices": [1, 3], **MAMBA},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "falcon_h1": {"mamba_d_ssm": 128, **MAMBA},
    **{family: {"layer_types": ["conv", "full_attention"] * 2} for family in ("lfm2", "lfm2_moe")},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), LINEAR),
}
"""Of a family, what else its config takes, or takes otherwise."""


def small(family: str, seed: int) -> PreTrainedModel:
    """A random model of four layers in float32; weights are large enough that attention is far from uniform."""
    known: Any = AutoConfig.for_model(family)
    sizes = {key: value for key, value in SIZES.items() if hasattr(known, key) or key == "head_dim"}
    config = AutoConfig.for_model(family, **sizes, **MORE.get(family, {}))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.14)
        for logits in sinks_of(model):
            logits.normal_(2, 1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def sinks_of(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith(".sinks")]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and mask."""
    ids = torch.randint(3, 150, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = torch.stack([torch.arange(max(LENGTHS)) >= max(LENGTHS) - n for n in LENGTHS]).long()
    return ids * mask, mask


def greedy(model: PreTrainedModel) -> list[list[int]]:
    ids, mask = batch()
    made: Any = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    return made[:, max(LENGTHS) :].tolist()


def attached(model: PreTrainedModel, method: str) -> list[list[int]]:
    with coattn.attach(model, method):
        return greedy(model)


def engine(model: PreTrainedModel, method: str) -> list[list[int]]:
    ids, mask = batch()
    with coattn.LLM((model, None), method, max_batch=2, max_length=128) as llm:
        prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        made = llm.generate(prompts, coattn.SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True))
    assert [str(each.error) for each in made if each.error] == []
    return [list(each.token_ids) for each in made]


def said(run: Callable[[], list[list[int]]], want: list[list[int]]) -> str:
    try:
        return "yes" if run() == want else "differs"
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return "refused"


def cells(family: str) -> list[str]:
    """What happens under `attach` and `LLM` with each of `ROWS`, and whether queries are predicted."""
    for seed in range(SEEDS):  # a text that repeats itself would prove little
        model = small(family, seed)
        want = greedy(model)
        if len({token for row in want for token in row}) > NEW - 3:
            break
    else:
        raise AssertionError(f"every random {family} repeats itself")
    found = [said(partial(run, model, method), want) for run in (attached, engine) for method in ROWS]
    return [*found, "no" if said(partial(attached, model, "scout"), want) == "refused" else "yes"]


def listed() -> dict[str, list[str]]:
    """The rows of the page."""
    found = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| `.*$", PAGE.read_text(), re.M)]
    return {row[0].strip("`"): row[1:] for row in found if row[0] != "`model_type`"}


def test_the_table_has_every_tested_family() -> None:
    assert {family: row[0] for family, row in listed().items()} == FAMILIES
    (less,) = re.findall(r"^With Transformers 5.17, .*$", PAGE.read_text(), re.M)
    assert tuple(re.findall(r"`(\w+)`", less)) == NOT_ON_OLDEST


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_runs_as_the_table_says(family: str) -> None:
    assert cells(family) == listed()[family][2:]


def test_sinks_change_the_tokens() -> None:
    """Else the table would say nothing of them."""
    model = small("gpt_oss", 0)
    want = greedy(model)
    with torch.no_grad():
        for logits in sinks_of(model):
            logits.fill_(-torch.inf)
    assert greedy(model) != want


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SAMPLE])
def test_so_does_every_other(family: str) -> None:
    if transformers.__version__.startswith("5.17.") and family in NOT_ON_OLDEST:
        with pytest.raises((ValueError, UnsupportedError)), coattn.attach(small(family, 0), "full"):
            pass
        return
    assert cells(family) == listed()[family][2:]


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        try:
            known = listed().get(name, ["", ""])[:2]
            print(f"| `{name}` | {' | '.join([*known, *cells(name)])} |".replace("|  |", "| |"), flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:200]}", flush=True)
