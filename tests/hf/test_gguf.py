"""Conversion of a GGUF made here: every weight where it belongs, and a tokenizer without the known traps."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from coattn.hf.gguf.convert import convert  # noqa: E402
from coattn.hf.load import load  # noqa: E402

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, FFN, POSITIONS = 2, 64, 4, 2, 16, 96, 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("1", "2"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TITLE, END = "tiny", "<|im_end|>"
EMBEDDED: Any = {"named_dtype": torch.float32, "end_token": END}
"""As the embedded model is converted."""


def byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K as GGUF orders them for rotary embedding: the halves of each head alternate."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def quantized(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Random weights that Q4_1 holds without loss, float32."""
    raw = gguf.quantize(rng.normal(0, 0.1, shape).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
    return gguf.dequantize(raw, gguf.GGMLQuantizationType.Q4_1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A GGUF file of a tiny Llama, and its weights by Transformers' names."""
    path = tmp_path_factory.mktemp("gguf") / "weights.gguf"
    tokens = SPECIAL + byte_alphabet() + [left + right for left, right in MERGES]
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges([f"{left} {right}" for left, right in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    weights: dict[str, np.ndarray] = {}

    def add(theirs: str, ours: str, value: np.ndarray, heads: int = 0) -> None:
        weights[f"model.{ours}.weight"] = value
        stored = interleave(value, heads) if heads else value
        if value.ndim == 1:
            writer.add_tensor(f"{theirs}.weight", stored)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{theirs}.weight", gguf.quantize(stored, kind), raw_dtype=kind)

    add("token_embd", "embed_tokens", quantized((len(tokens), HIDDEN), rng))
    add("output_norm", "norm", rng.normal(1, 0.1, HIDDEN).astype(np.float32))
    for i in range(LAYERS):
        blk, layer = f"blk.{i}", f"layers.{i}"
        add(f"{blk}.attn_norm", f"{layer}.input_layernorm", rng.normal(1, 0.1, HIDDEN).astype(np.float32))
        add(f"{blk}.ffn_norm", f"{layer}.post_attention_layernorm", rng.normal(1, 0.1, HIDDEN).astype(np.float32))
        add(f"{blk}.attn_q", f"{layer}.self_attn.q_proj", quantized((HEADS * HEAD, HIDDEN), rng), HEADS)
        add(f"{blk}.attn_k", f"{layer}.self_attn.k_proj", quantized((KV_HEADS * HEAD, HIDDEN), rng), KV_HEADS)
        add(f"{blk}.attn_v", f"{layer}.self_attn.v_proj", quantized((KV_HEADS * HEAD, HIDDEN), rng))
        add(f"{blk}.attn_output", f"{layer}.self_attn.o_proj", quantized((HIDDEN, HEADS * HEAD), rng))
        add(f"{blk}.ffn_gate", f"{layer}.mlp.gate_proj", quantized((FFN, HIDDEN), rng))
        add(f"{blk}.ffn_up", f"{layer}.mlp.up_proj", quantized((FFN, HIDDEN), rng))
        add(f"{blk}.ffn_down", f"{layer}.mlp.down_proj", quantized((HIDDEN, FFN), rng))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


@pytest.fixture(scope="module")
def folder(source: tuple[Path, dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    made_with = convert(source[0], made, torch.float16, TITLE, **EMBEDDED)
    assert {"coattn", "torch", "transformers", "gguf"} <= set(made_with)
    return made


def test_every_weight_is_the_files_own_to_half_precision(
    source: tuple[Path, dict[str, np.ndarray]], folder: Path
) -> None:
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == source[1].keys()
    for name, value in source[1].items():
        torch.testing.assert_close(saved[name], torch.from_numpy(value).half(), rtol=2**-10, atol=1e-6)


def test_plain_transformers_loads_it_in_float32(folder: Path) -> None:
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32


def test_there_is_no_pickle_and_everyone_may_read_it(folder: Path) -> None:
    own = "config.json generation_config.json tokenizer.json tokenizer_config.json chat_template.jinja"
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", *own.split()}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_the_tokenizer_avoids_the_traps(folder: Path) -> None:
    tokenizer = load(folder, device="cpu").tokenizer
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("hello 12")["input_ids"])
    assert pieces == ["hello", "Ġ", "1", "2"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.decode(tokenizer("a ▁ b , c")["input_ids"]) == "a ▁ b , c"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("<|im_start|>12")["input_ids"])
    assert pieces == ["<|im_start|>", "1", "2"]
    assert tokenizer.decode(tokenizer("<|im_start|>12")["input_ids"], skip_special_tokens=True) == "12"
    assert tokenizer.chat_template == TEMPLATE


def test_the_model_stops_at_the_end_token(folder: Path) -> None:
    loaded = load(folder, device="cpu")
    for config in (loaded.model.config, loaded.model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


def test_converting_prints_nothing(
    source: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    convert(source[0], tmp_path, torch.float16, TITLE, **EMBEDDED)
    sys.stderr.flush()
    assert capfd.readouterr() == ("", "")
