"""Tiny checkpoints in 4 and 8 bits, written as the formats' public descriptions say, and the numbers that they mean."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.engine.small import tokenizer
from tests.hf.families import tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from coattn.kernels.quantise.weights import TABLES

Stored = tuple[dict[str, Tensor], Tensor]
"""A layer's tensors by the ends of their names, and the weights that they mean, `[n, k]`."""
GROUP, GROUP_NF4 = 16, 32


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes from 0 on along the last axis, in int32: the word's field i holds code `order[i]` of those in the word."""
    per = 32 // bits
    parts = codes.long().view(*codes.shape[:-1], -1, per)
    found = sum(parts[..., (order or tuple(range(per)))[i]] << (bits * i) for i in range(per))
    assert isinstance(found, Tensor)
    return (found - ((found >> 31) << 32)).int()


def levels(weight: Tensor, bits: int, group: int, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes `[n, k]`, scales and zeros `[n, k / group]`, and the weights that they mean."""
    parts, top = weight.view(len(weight), -1, group), 2**bits - 1
    low, high = parts.amin(-1), parts.amax(-1)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / (top - 1)).half()
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if symmetric else (-low / scales).round().clamp(0, top)
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    meant = (codes - zeros[..., None]) * scales[..., None].float()
    return codes.view_as(weight).long(), scales, zeros.long(), meant.view_as(weight)


def awq(weight: Tensor) -> Stored:
    codes, scales, zeros, meant = levels(weight, 4, GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(codes.T, 4, order), "qzeros": words(zeros.T, 4, order), "scales": scales.T}, meant


def gptq(weight: Tensor, bits: int = 4, less: int = 1, sort: bool = False) -> Stored:
    """sort: the groups are of columns that are not neighbours."""
    k = weight.shape[1]
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if sort else torch.arange(k)
    codes, scales, zeros, meant = levels(weight[:, order], bits, GROUP)
    back = torch.argsort(order)
    tensors = {
        "qweight": words(codes[:, back], bits).T,
        "qzeros": words((zeros.T - less) % 2**bits, bits),
        "scales": scales.T,
        "g_idx": (back // GROUP).int(),
    }
    return tensors, meant[:, back]


def pack_quantized(weight: Tensor, bits: int = 4, symmetric: bool = True, group: int = GROUP) -> Stored:
    codes, scales, zeros, meant = levels(weight, bits, group, symmetric)
    tensors = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return tensors if symmetric else {**tensors, "weight_zero_point": words(zeros.T, bits).T}, meant


def int8_rows(weight: Tensor) -> Stored:
    codes, scales, _, meant = levels(weight, 8, weight.shape[1], symmetric=True)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, meant


def float8(weight: Tensor, name: str = "weight_scale", rows: int = 0, columns: int = 0) -> Stored:
    """rows, columns: of a block that shares a scale; 0: all."""
    n, k = weight.shape
    rows, columns = rows or n, columns or k
    padded = nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
    parts = padded.view(len(padded) // rows, rows, -1, columns)
    scales = parts.abs().amax((1, 3)) / 448
    codes = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    meant = (codes.float() * scales[:, None, :, None]).view_as(padded)[:n, :k]
    scale = scales.view(1) if scales.numel() == 1 else scales
    return {"weight": codes.view_as(padded)[:n, :k], name: scale}, meant


def nf4(weight: Tensor, nested: bool = True) -> Stored:
    """As bitsandbytes stores it: blocks of 64 over the whole matrix, their scales in 8 bits by blocks of 256."""
    table = torch.tensor(TABLES["nf4"])
    parts = weight.reshape(-1, GROUP_NF4)
    scales = parts.abs().amax(-1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": GROUP_NF4, "dtype": "bfloat16", "shape": [*weight.shape]}
    tensors = {"weight.quant_map": table, "weight.absmax": scales}
    if nested:
        offset, several = float(scales.mean()), 16
        numbers = torch.linspace(-1, 1, 256) ** 3
        rest = nn.functional.pad(scales - offset, (0, -len(scales) % several)).view(-1, several)
        outer = rest.abs().amax(-1)
        found = (rest[..., None] / outer[:, None, None] - numbers).abs().argmin(-1)
        scales = (numbers[found] * outer[:, None]).flatten()[: len(scales)] + offset
        tensors |= {"weight.absmax": found.flatten()[: len(scales)].to(torch.uint8)}
        tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": numbers}
        state |= {"nested_blocksize": several, "nested_dtype": "float32", "nested_offset": offset}
    codes = (parts[..., None] / scales[:, None, None] - table).abs().argmin(-1)
    pairs = codes.view(-1, 2)
    tensors["weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    return tensors, (table[codes] * scales[:, None]).view_as(weight)


def int8_by_127(weight: Tensor) -> Stored:
    worst = weight.abs().amax(1)
    codes = (weight / worst[:, None] * 127).round()
    tensors = {"weight": codes.to(torch.int8), "SCB": worst, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return tensors, codes * worst[:, None] / 127


def mxfp4(weight: Tensor) -> Stored:
    """Blocks of 32 codes, two to a byte, and the exponents of their scales."""
    parts = weight.unflatten(-1, (-1, 32))
    exponents = (parts.abs().amax(-1).log2().floor() - 2 + 127).to(torch.uint8)
    scales = torch.exp2(exponents.float() - 127)[..., None]
    codes = (parts[..., None] / scales[..., None] - FP4).abs().argmin(-1)
    pairs = codes.view(*codes.shape[:-1], 16, 2)
    tensors = {"blocks": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), "scales": exponents}
    return tensors, (FP4[codes] * scales).view_as(weight)


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([FP4, -FP4])


def _scheme(bits: int, kind: str = "int", **options: Any) -> dict[str, Any]:
    return {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **options}}}
    }


COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq sorted": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, lambda w: gptq(w, sort=True)),
    "gptq v2": ({"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, 8, 0)),
    "int4": ({**COMPRESSED, **_scheme(4)}, pack_quantized),
    "int4 zeros": ({**COMPRESSED, **_scheme(4, symmetric=False)}, lambda w: pack_quantized(w, symmetric=False)),
    "int8": ({**COMPRESSED, **_scheme(8)}, lambda w: pack_quantized(w, 8, group=w.shape[1])),
    "int8 bytes": ({**COMPRESSED, **_scheme(8), "format": "int-quantized"}, int8_rows),
    "fp8 rows": ({**COMPRESSED, **_scheme(8, "float"), "format": "float-quantized"}, lambda w: float8(w, rows=1)),
    "fp8": ({"quant_method": "fp8", "weight_block_size": None}, lambda w: float8(w, "weight_scale_inv")),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        lambda w: float8(w, "weight_scale_inv", 32, 32),
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, mxfp4),
    "nf4": ({**NF4}, nf4),
    "nf4 plain": ({**NF4, "bnb_4bit_use_double_quant": False}, lambda w: nf4(w, nested=False)),
    "bnb int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_by_127),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, lambda w: float8(w, rows=1)),
}


@torch.no_grad()
def write(folder: Path, scheme: str, family: str = "llama", model: Any = None) -> PreTrainedModel:
    """A quantised folder; returns the model that it means, in float32. model: another than a tiny one."""
    model = tiny(family) if model is None else model
    quantised, store = SCHEMES[scheme]
    tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head" and scheme != "mxfp4":
            made, meant = store(module.weight)
            module.weight.copy_(meant)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{end}": tensor for end, tensor in made.items()}
        elif name.endswith(".experts"):
            tensors |= _experts(name, module, store, tensors, family)
        elif name == "lm_head" or isinstance(module, nn.Embedding):
            module.weight.copy_(module.weight.half())
        elif not list(module.children()) or name.endswith(".self_attn"):  # which may have sinks
            for parameter in module.parameters(recurse=False):
                parameter.copy_(parameter.half())
    if family == "mixtral":
        tensors = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}
    model.config.quantization_config = quantised
    model.config.save_pretrained(folder)
    del model.config.quantization_config
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    tokenizer().save_pretrained(folder)
    return model


def _experts(
    path: str, own: Any, store: Callable[[Tensor], Stored], tensors: dict[str, Tensor], family: str
) -> dict[str, Tensor]:
    """The tensors of a module of experts, whose numbers become those that they mean; its own ones are taken out."""
    found = {}
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(own, name)
        del tensors[f"{path}.{name}"]
        if own.is_transposed:
            made, meant = store(weight.transpose(1, 2).contiguous())
            weight.copy_(meant.transpose(1, 2))
            found |= {f"{path}.{name}_{end}": tensor for end, tensor in made.items()}
            bias = getattr(own, f"{name}_bias")
            bias.copy_(bias.half())
            continue
        for i, each in enumerate(weight):
            parts = zip(names[:2], each.chunk(2), strict=True) if name == "gate_up_proj" else [(names[2], each)]
            for part, rows in parts:
                made, meant = store(rows.contiguous())
                rows.copy_(meant)
                found |= {f"{path}.{i}.{part}.{end}": tensor for end, tensor in made.items()}
    return found


def edit_config(folder: Path, **changes: Any) -> None:
    """Other values in the folder's `quantization_config`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
