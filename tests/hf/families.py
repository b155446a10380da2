"""A tiny random model of every supported family."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 19}
MIXED = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "llama_multi_query": ("LlamaConfig", {**COMMON, "num_key_value_heads": 1, "head_dim": 24}),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen2_sliding": (
        "Qwen2Config",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": None}),
    "mistral_sliding": ("MistralConfig", {**GROUPED, "sliding_window": 23}),
    "gemma": ("GemmaConfig", {**GROUPED, "head_dim": 32}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {**GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "glm": ("GlmConfig", {**GROUPED, "head_dim": 16}),
    "glm4": ("Glm4Config", {**GROUPED, "head_dim": 16}),
    "phi3": ("Phi3Config", {**GROUPED, "sliding_window": None}),
    "phi3_sliding": ("Phi3Config", {**GROUPED, "sliding_window": 25}),
    "qwen3_moe": ("Qwen3MoeConfig", {**MIXED, "head_dim": 16, "num_experts": 8}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**MIXED, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1, "use_qk_norm": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "mixtral": ("MixtralConfig", {**MIXED, "num_local_experts": 4, "sliding_window": None}),
    "opt": ("OPTConfig", {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_neox": ("GPTNeoXConfig", COMMON),
    "gpt_oss": ("GptOssConfig", {**GROUPED, "head_dim": 16, "sliding_window": 18, "num_local_experts": 4}),
}

FEATURED = ("llama", "llama_multi_query", "mistral_sliding", "gemma2", "gemma3", "gpt_oss")
"""Everything that a store or a rule sees of a family is in one of these: groups, windows of some or all layers,
soft-capping, a scale of its own, sinks. The others differ before keys are stored or after attention."""


def tiny(family: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model, the same at every call. Weights are large enough that attention is far from uniform."""
    name, options = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    # eager: what else Transformers may choose by itself leaves out soft-capping in some releases
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**options), attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.14)
            elif path.endswith(".sinks"):  # about as much of the softmax as all keys together
                parameter.normal_(2, 1)
            elif family == "gpt_oss" and path.endswith("_proj.bias"):
                parameter.normal_(0, 0.3)
    return model.to(device=device, dtype=dtype).eval()
