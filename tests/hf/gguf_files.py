"""Tiny GGUF files whose matrices are random blocks of a type, and the model of the numbers that they mean."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tests.engine.small import tokenizer
from tests.hf.test_gguf_blocks import random_blocks
from transformers import AutoModelForCausalLM, PreTrainedModel

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 256, 512, 2, 4, 2, 64
VOCABULARY = {"phi3": 32_064}
"""Where a family has a default of a token that pads; of others 260."""
CONFIGS = {"llama": "LlamaConfig", "qwen3": "Qwen3Config", "qwen2": "Qwen2Config", "phi3": "Phi3Config"} | {
    "gemma3": "Gemma3TextConfig"
}
MIX = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"}
"""Tensors of another type than the others, as in files that are called Q4_K_M."""


def blocks(name: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random blocks of weights of about 0.14."""
    return random_blocks(name, rows, columns, seed, spread=0.14)


def write(
    path: Path, kind: str, architecture: str = "llama", tied: bool = False, skip: str = "", cut: str = ""
) -> PreTrainedModel:
    """A file; returns the model that it means, in float32. skip, cut: a tensor that is left out, or too short."""
    vocabulary = VOCABULARY.get(architecture, 260)
    config: Any = getattr(transformers, CONFIGS[architecture])(
        vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD, max_position_embeddings=512,
        tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rms_norm_eps=1e-5,
        pad_token_id=None, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(vocabulary)
    words = tokenizer().get_vocab()
    tokens = sorted(words, key=words.__getitem__)
    tokens += ["he", *(f"<{i}>" for i in range(len(tokens) + 1, vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] + [1] * (vocabulary - 257))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(256)
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], LAYERS)
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        owner, _, end = name.rpartition(".")
        theirs = f"{names.get_name(owner)}.{end}"
        if theirs == skip:
            continue
        short = theirs.split(".")[-2]
        order = torch.arange(len(parameter))
        if architecture == "llama" and short in ("attn_q", "attn_k"):
            order = order.view(-1, 2, HEAD // 2).transpose(1, 2).flatten()  # of each head, the halves in turns
        if parameter.ndim == 1:
            numbers = torch.randn(parameter.shape) * 0.1 + (end == "weight")
            stored = numbers + 1 if architecture.startswith("gemma") else numbers
            writer.add_tensor(theirs, stored[order][: -1 if theirs == cut else None].numpy())
        else:
            own = gguf.GGMLQuantizationType[MIX.get(short, kind) if kind == "Q4_K" else kind]
            raw = blocks(own.name, *parameter.shape, seed)
            meant = torch.from_numpy(gguf.dequantize(raw, own))
            numbers = torch.empty_like(meant).index_copy_(0, order, meant)
            writer.add_tensor(theirs, raw[: -1 if theirs == cut else None], raw_dtype=own)
        with torch.no_grad():
            parameter.copy_(numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
