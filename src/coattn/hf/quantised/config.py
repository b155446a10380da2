"""What a config.json says about quantised weights. PyTorch is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PACKED = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes", "gguf")
"""Quantisations that coattn reads itself and keeps packed."""
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""Of compressed-tensors."""


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How a checkpoint's weights are quantised; empty: they are not."""
    return config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether coattn reads the weights itself and keeps them packed."""
    return quantisation(config).get("quant_method") in PACKED


def describe(config: Mapping[str, Any]) -> tuple[str, str]:
    """In how many bits, and in which groups they have scales; as far as config.json says."""
    found = quantisation(config)
    if found["quant_method"] == "gguf":
        return ", ".join(found["types"]) or "numbers", "groups of 16 or 32"
    if found["quant_method"] == "mxfp4":
        return "fp4", "groups of 32"
    if found["quant_method"] == "bitsandbytes":
        return ("int8", "rows") if found.get("load_in_8bit") else ("nf4", "groups of 64")
    weights = next(iter(_weights(found)), {})
    bits = found.get("bits") or weights.get("num_bits") or (4 if found["quant_method"] == "awq" else 8)
    is_float = "fp8" in found["quant_method"] or weights.get("type") == "float"
    group = found.get("group_size") or weights.get("group_size")
    block = found.get("weight_block_size") or weights.get("block_structure")
    scales = f"groups of {group}" if group and group > 0 else f"blocks {block[0]} x {block[1]}" if block else "rows"
    return ("fp8" if is_float else f"int{bits}"), scales


def refuse_packed(quantised: Mapping[str, Any]) -> str | None:
    """What of a `quantization_config` in `PACKED` is not understood, or None."""
    method, bits = quantised["quant_method"], quantised.get("bits", 4)
    if method == "awq" and (bits != 4 or str(quantised.get("version", "gemm")).lower() != "gemm"):
        return f"{bits} bits in version {quantised.get('version', 'gemm')!r}"
    if method == "bitsandbytes" and not quantised.get("load_in_8bit"):
        kind = quantised.get("bnb_4bit_quant_type", "fp4")
        return None if kind == "nf4" else f"4 bits of type {kind!r}"
    if method == "gptq":
        layout = quantised.get("checkpoint_format") or "gptq"
        return None if bits in (4, 8) and layout in ("gptq", "gptq_v2") else f"{bits} bits in format {layout!r}"
    if method == "compressed-tensors":
        formats = [quantised.get("format", "pack-quantized")]
        groups = [group for group in (quantised.get("config_groups") or {}).values() if group]
        own = [group["format"] for group in groups if group.get("format")]
        unknown = [name for name in (own if formats == ["mixed-precision"] else formats + own) if name not in FORMATS]
        if unknown:
            return f"format {unknown[0]!r}"
        for key, plain in (("sparsity_config", "dense"), ("transform_config", None)):
            if (found := quantised.get(key)) and (plain is None or found.get("format", plain) != plain):
                return f"a {key}"
        for weights in _weights(quantised):
            if (weights.get("num_bits"), weights.get("type", "int")) not in ((4, "int"), (8, "int"), (8, "float")):
                return f"{weights.get('num_bits')} bits of type {weights.get('type', 'int')!r}"
    return None


def _weights(quantised: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of each group of layers."""
    return [group["weights"] for group in (quantised.get("config_groups") or {}).values() if group.get("weights")]
