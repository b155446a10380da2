"""How checkpoints store the tensors of a quantised linear layer, made into the one layout of `Packed`.

Every function reads one layer's tensors by the ends of their names, on any device. It checks their shapes, so a first
call with tensors without memory tells before anything is read whether a file is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.errors import UnsupportedError
from coattn.kernels.quantise.weights import LEAST_SPAN, TABLES, Packed, can_join, pack

Tensors = Mapping[str, Tensor]
NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
"""What else bitsandbytes says of a matrix: JSON in bytes."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of the eight codes in a word of AWQ, which one is that of each column."""


class MisshapenError(Exception):
    """The end of the name of a tensor whose shape or dtype does not fit its layer."""


class Format(NamedTuple):
    """One way to store a layer."""

    needs: tuple[str, ...]
    may: tuple[str, ...]
    """Tensors that a layer need not have."""
    read: Callable[[Tensors, int, int], Packed]
    """Of a layer's tensors, and its outputs and inputs."""
    joint: str = "."
    """Between the names of the layer and of its tensors."""


def formats_of(quantised: Mapping[str, Any]) -> list[Format]:
    """The formats in which a checkpoint with this `quantization_config` stores its layers, the first that fits first.

    What is not known is refused before, in `hf/families.py`.
    """
    method = quantised["quant_method"]
    if method == "awq":
        return [Format(("qweight", "qzeros", "scales"), (), read_awq)]
    if method == "gptq":
        plus = 0 if quantised.get("checkpoint_format") == "gptq_v2" else 1
        return [Format(("qweight", "qzeros", "scales"), ("g_idx",), partial(read_gptq, plus=plus))]
    if method == "fp8":
        read = partial(read_bytes, scale="weight_scale_inv", block=quantised.get("weight_block_size"))
        return [Format(("weight", "weight_scale_inv"), (), read)]
    if method == "mxfp4":
        return []
    if method == "bitsandbytes":
        needs = "weight", "weight.absmax", "weight.quant_map", NF4_STATE
        nested = "weight.nested_absmax", "weight.nested_quant_map"
        in_8_bits = Format(("weight", "SCB"), (), read_int8_rows)
        return [in_8_bits if quantised.get("load_in_8bit") else Format(needs, nested, read_nf4)]
    groups = [group.get("weights") or {} for group in (quantised.get("config_groups") or {}).values()]
    block = next((found for weights in groups if (found := weights.get("block_structure"))), None)
    packed = ("weight_packed", "weight_scale")
    return [
        Format(packed, ("weight_zero_point", "weight_g_idx"), read_pack_quantized),
        Format(("weight", "weight_scale"), ("weight_zero_point",), partial(read_bytes, block=block)),
    ]


def read_awq(t: Tensors, n: int, k: int) -> Packed:
    """Words along the columns of the transposed matrix, eight codes in each, in another order; zeros likewise."""
    groups = _length(t, "scales")
    _check(t, qweight=(k, n // 8), qzeros=(groups, n // 8), scales=(groups, n))
    codes, zeros = (
        fields(t[name], 4).view(len(t[name]), -1, 8)[..., AWQ_ORDER].flatten(-2) for name in ("qweight", "qzeros")
    )
    return _pack_ints(codes.T, t["scales"], zeros, 4)


def read_gptq(t: Tensors, n: int, k: int, plus: int = 1) -> Packed:
    """Words along the rows of the transposed matrix. Zeros in words along its columns, less `plus`."""
    bits, groups = _bits(t, "qweight", k), _length(t, "scales")
    per = 32 // bits
    _check(t, qweight=(k // per, n), qzeros=(groups, n // per), scales=(groups, n))
    zeros = (fields(t["qzeros"], bits) + plus) & (2**bits - 1)
    return _pack_ints(fields(t["qweight"].T, bits), t["scales"], zeros, bits, t.get("g_idx"))


def read_pack_quantized(t: Tensors, n: int, k: int) -> Packed:
    """compressed-tensors in words along the rows. Zeros in words along the first axis."""
    bits, groups = _bits(t, "weight_packed", k, -1), _length(t, "weight_scale", 1)
    per = 32 // bits
    _check(t, weight_packed=(n, k // per), weight_scale=(n, groups))
    zeros = None
    if "weight_zero_point" in t:
        _check(t, weight_zero_point=(n // per, groups))
        zeros = fields(t["weight_zero_point"].T, bits)
    return _pack_ints(fields(t["weight_packed"], bits), t["weight_scale"].T, zeros, bits, t.get("weight_g_idx"))


def read_nf4(t: Tensors, n: int, k: int) -> Packed:
    """Of the matrix row by row: two codes to a byte, the first in its high half; blocks of columns with a scale. Scales
    may be codes themselves, of larger blocks."""
    pairs, scales, state = t["weight"].reshape(-1), t["weight.absmax"].reshape(-1), t[NF4_STATE]
    group = n * k // max(1, scales.numel())
    if pairs.dtype != torch.uint8 or pairs.numel() != n * k // 2:
        raise MisshapenError("weight")
    if scales.numel() * group != n * k or k % group or group % LEAST_SPAN:
        raise MisshapenError("weight.absmax")
    if scales.dtype == torch.uint8:
        nested = t.get("weight.nested_absmax"), t.get("weight.nested_quant_map")
        if nested[0] is None or nested[1] is None or nested[1].numel() != 256:
            raise MisshapenError("weight.nested_absmax")
        several, offset = -(-scales.numel() // nested[0].numel()), 0.0
        if not state.is_meta:
            said = json.loads(bytes(state.tolist()))
            several, offset = int(said["nested_blocksize"]), float(said["nested_offset"])
        wide = nested[0].float().repeat_interleave(several)[: scales.numel()]
        if len(wide) != scales.numel():
            raise MisshapenError("weight.nested_absmax")
        scales = nested[1].float()[scales.int()] * wide + offset
    numbers = t["weight.quant_map"]
    if not numbers.is_meta and not torch.equal(numbers.cpu().float(), torch.tensor(TABLES["nf4"])):
        raise MisshapenError("weight.quant_map")
    codes = torch.stack([pairs >> 4, pairs & 15], -1).view(n, k)
    return pack(codes, scales.view(n, -1).T, None, "nf4", group)


def read_int8_rows(t: Tensors, n: int, k: int) -> Packed:
    """int8, and of each row what 127 stands for."""
    _check(t, weight=(n, k), SCB=(n,))
    if t["weight"].dtype != torch.int8:
        raise MisshapenError("weight")
    return pack(t["weight"], (t["SCB"].float() / 127)[None], None, "int8", k)


def read_mxfp4(t: Tensors, n: int, k: int) -> Packed:
    """Of all experts: blocks of 32 codes `[experts, n, blocks, 16]`, the first in the low half of a byte, the second in
    its high half; and their exponents."""
    experts = t["blocks"].shape[0]
    _check(t, blocks=(experts, n, k // 32, 16), scales=(experts, n, k // 32))
    if k % 32 or any(x.dtype != torch.uint8 for x in t.values()):
        raise MisshapenError("blocks")
    pairs = t["blocks"]
    codes = torch.stack([pairs & 15, pairs >> 4], -1).view(experts * n, k)
    both = pack(codes, t["scales"].view(experts * n, -1).T, None, "fp4", 32)
    return each_of(both, experts)


MXFP4 = Format(("blocks", "scales"), (), read_mxfp4, "_")
"""Of all experts of a layer; other layers are numbers."""


def each_of(weight: Packed, count: int) -> Packed:
    """A matrix as so many over the same input."""
    n = weight.out_features // count
    return stack([weight.between(i * n, (i + 1) * n) for i in range(count)])


def check_alike(weights: Sequence[Packed]) -> None:
    """Raises MisshapenError or UnsupportedError for matrices that cannot be one."""
    if any(each.order is not None for each in weights):
        raise UnsupportedError(
            "The experts have columns that are sorted, each in its own way (desc_act), which coattn does not read.",
            "Choose a checkpoint without desc_act.",
        )
    if not can_join(weights):
        raise MisshapenError("scales")


def stack(weights: Sequence[Packed]) -> Packed:
    """Matrices of the same shape, stored alike, as the experts of one module."""
    check_alike(weights)
    found: dict[str, Any] = {name: torch.stack([getattr(x, name) for x in weights]) for name in weights[0].tensors}
    return weights[0]._replace(**found)


def read_bytes(t: Tensors, n: int, k: int, scale: str = "weight_scale", block: tuple[int, int] | None = None) -> Packed:
    """int8 or float8_e4m3fn, with a scale for all, of each row, of groups in it, or of blocks `(rows, columns)`."""
    _check(t, weight=(n, k))
    codes, scales, zeros = t["weight"], t[scale], t.get("weight_zero_point")
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn) or not scales.is_floating_point():
        raise MisshapenError("weight")
    form = "int8" if codes.dtype == torch.int8 else "fp8"
    if scales.numel() == 1:
        group, rows, scales = k, n, scales.reshape(1, 1)
    elif block is not None:
        rows, group = block
        _check(t, **{scale: (-(-n // rows), -(-k // group))})
    else:
        scales = scales.reshape(n, -1) if scales.dim() == 1 else scales
        rows, group = 1, k // max(1, scales.shape[1])
        if scales.shape != (n, k // group):
            raise MisshapenError(scale)
    if zeros is not None:
        zeros = zeros.reshape(scales.shape).T.to(torch.int8).contiguous()
    scales = scales.float() if scales.element_size() == 1 else scales  # powers of two in 8 bits
    return pack(codes.view(torch.uint8) if form == "fp8" else codes, scales.T, zeros, form, group, rows)


def fields(words: Tensor, bits: int) -> Tensor:
    """The codes in words of 32 bits along the last axis, the lowest bits first: uint8."""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack([found & 15, found >> 4], -1).flatten(-2)


def _pack_ints(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, of: Tensor | None = None) -> Packed:
    """codes `[n, k]` and zeros `[groups, n]` from 0 on. of `[k]`: each column's group, where they are not in order."""
    k, groups = codes.shape[1], len(scales)
    if not scales.is_floating_point() or k % groups or (bits == 4 and k // groups % 2):
        raise MisshapenError("scales")
    order = None
    if of is not None:
        order = _order(of, groups, k)
        codes = codes if order is None else codes[:, order]
    if bits == 8:
        codes, zeros = codes ^ 128, None if zeros is None else zeros ^ 128
        codes = codes.view(torch.int8)
    zeros = None if zeros is None else zeros.contiguous().view(torch.int8)
    packed = pack(codes.contiguous(), scales, zeros, f"int{bits}", k // groups)
    return packed if order is None else packed._replace(order=order.int())


def _order(of: Tensor, groups: int, k: int) -> Tensor | None:
    """The columns sorted by their group; None where they are."""
    if of.shape != (k,):
        raise MisshapenError("g_idx")
    want = torch.arange(k, device=of.device) // (k // groups)
    if of.is_meta or torch.equal(of.long(), want):
        return None
    order = torch.argsort(of, stable=True)
    if not torch.equal(of[order].long(), want):
        raise MisshapenError("g_idx")
    return order


def _bits(t: Tensors, name: str, k: int, axis: int = 0) -> int:
    bits = 32 * _length(t, name, axis) // k
    if bits not in (4, 8):
        raise MisshapenError(name)
    return bits


def _length(t: Tensors, name: str, axis: int = 0) -> int:
    if t[name].dim() != 2:
        raise MisshapenError(name)
    return t[name].shape[axis]


def _check(t: Tensors, **shapes: tuple[int, ...]) -> None:
    for name, shape in shapes.items():
        words = name in ("qweight", "qzeros", "weight_packed") and t[name].dtype != torch.int32
        if tuple(t[name].shape) != shape or 0 in shape or words:
            raise MisshapenError(name)
