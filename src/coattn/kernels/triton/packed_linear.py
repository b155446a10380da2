"""Linear layers whose weights stay in 4 or 8 bits: of a few tokens never unpacked in memory, else one at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.quantise.weights import OFFSET, Packed
from coattn.kernels.triton.launch import INTERPRETED, options

MOST_TOKENS = 32
LEAST_SPAN = 32
"""Columns that a matrix product of 16-bit numbers takes, twice."""
FORMS = {"int4": 4, "int8": 8, "fp8": 1}
DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def _numbers(codes, FORM: tl.constexpr, F16: tl.constexpr):
    """Codes as 16-bit numbers, exactly: those of 4 bits are the last bits of 128, or of 1024 in float16."""
    if FORM == 4:
        if F16:
            found = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        else:
            found = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif FORM == 1:  # bits of float8_e4m3fn: their exponents are 120 too low, in those of float32
        wide = codes.to(tl.int32)
        value = (((wide & 128) << 24) | ((wide & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        found = value.to(tl.float16 if F16 else tl.bfloat16)
    else:
        found = codes.to(tl.float16 if F16 else tl.bfloat16)
    return found


PAIRS = tl.constexpr("""{
.reg .b32 t, u;
and.b32 t, $4, 0x0F0F0F0F;
prmt.b32 $0, t, MAGIC, 0x4140;
prmt.b32 $1, t, MAGIC, 0x4342;
shr.u32 u, $4, 4;
and.b32 u, u, 0x0F0F0F0F;
prmt.b32 $2, u, MAGIC, 0x4140;
prmt.b32 $3, u, MAGIC, 0x4342;
}""")
"""Four bytes of codes as four numbers of their low and four of their high halves, in seven instructions."""
PAIRS_BF16 = tl.constexpr(PAIRS.value.replace("MAGIC", "0x43434343"))
PAIRS_F16 = tl.constexpr(PAIRS.value.replace("MAGIC", "0x64646464"))
BY_HAND = tl.constexpr(not INTERPRETED)


@triton.jit
def _halves(pair, F16: tl.constexpr):
    """`_numbers` of the low and the high halves of bytes."""
    if not BY_HAND:
        low, high = _numbers(pair & 15, 4, F16), _numbers(pair >> 4, 4, F16)
    elif F16:
        low, high = tl.inline_asm_elementwise(
            PAIRS_F16, "=r,=r,=r,=r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            PAIRS_BF16, "=r,=r,=r,=r,r", [pair], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def _packed(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, b_ptr, r_ptr, out_ptr, m, n, k, x_row, scale_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    FORM: tl.constexpr, OFFSET: tl.constexpr, F16: tl.constexpr, SPAN: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """BN rows of weights for all tokens. A span's product is that of its codes; scales and zeros come afterwards."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = rows < n
    t = tl.arange(0, M)
    HALF: tl.constexpr = SPAN // 2
    x_at = x_ptr + t[:, None] * x_row
    token = (t < m)[:, None]
    acc = tl.zeros([M, BN], tl.float32)
    # what zeros take away is a sum of inputs: as a product with ones every thread has those of its own outputs
    ones = tl.full([SPAN, BN], 1.0, x_ptr.dtype.element_ty)
    # scales and zeros of the next span are on their way while this one is computed
    scale_at, zero_at = scale_ptr + rows // ROWS, zero_ptr + rows // ROWS
    scale = tl.load(scale_at, mask=inside, other=0.0)
    zero = tl.load(zero_at, mask=inside, other=0) if ZEROS else scale
    for start in range(0, k, SPAN):
        following = (start + SPAN) // GROUP * scale_row
        more = rows < tl.where(start + SPAN < k, n, 0)
        next_scale = tl.load(scale_at + following, mask=more, other=0.0)
        next_zero = tl.load(zero_at + following, mask=more, other=0) if ZEROS else next_scale
        part = tl.zeros([M, BN], tl.float32)
        if FORM == 4:
            c = tl.arange(0, HALF)[None, :]
            at = codes_ptr + rows.to(tl.int64)[:, None] * (k // 2) + start // 2 + c
            pair = tl.load(at, mask=inside[:, None], other=0, eviction_policy="evict_first")
            low = tl.load(x_at + start + c, mask=token, other=0.0)
            high = tl.load(x_at + start + HALF + c, mask=token, other=0.0)
            one, other = _halves(pair, F16)
            part = tl.dot(low, tl.trans(one), part)
            part = tl.dot(high, tl.trans(other), part)
            # loaded once more, for a product whose operands lie in other registers
            both = tl.arange(0, SPAN)[None, :]
            total = tl.dot(tl.load(x_at + start + both, mask=token, other=0.0), ones)
        else:
            c = tl.arange(0, SPAN)[None, :]
            at = codes_ptr + rows.to(tl.int64)[:, None] * k + start + c
            code = tl.load(at, mask=inside[:, None] & (c < k - start), other=0, eviction_policy="evict_first")
            x = tl.load(x_at + start + c, mask=token & (c < k - start), other=0.0)
            part = tl.dot(x, tl.trans(_numbers(code, FORM, F16)), part)
            if ZEROS:
                total = tl.dot(x, ones)
        bias = tl.full([BN], OFFSET + (1024 if F16 else 128) if FORM == 4 else OFFSET, tl.float32)
        if ZEROS:
            bias += zero.to(tl.float32)
        if FORM == 4 or ZEROS:
            part -= total * bias[None, :]
        acc += part * scale.to(tl.float32)[None, :]
        scale, zero = next_scale, next_zero
    if BIAS:
        acc += tl.load(b_ptr + rows, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = acc.to(out_ptr.dtype.element_ty)
    at = t[:, None] * n + rows[None, :]
    if RESIDUAL:
        y = tl.load(r_ptr + at, mask=token & inside[None, :], other=0.0) + y
    tl.store(out_ptr + at, y, mask=token & inside[None, :])


@triton.jit
def _unpack(
    codes_ptr, scale_ptr, zero_ptr, out_ptr, n, k, scale_row, GROUP: tl.constexpr, ROWS: tl.constexpr,
    ZEROS: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One span of BN rows as numbers."""
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = rows < n
    start = tl.program_id(0) * SPAN
    of = start // GROUP * scale_row + rows // ROWS
    scale = tl.load(scale_ptr + of, mask=inside, other=0.0).to(tl.float32)[:, None]
    zero = tl.full([BN], OFFSET, tl.float32)
    if ZEROS:
        zero = tl.load(zero_ptr + of, mask=inside, other=0).to(tl.float32)
    row = rows.to(tl.int64)[:, None]
    HALF: tl.constexpr = SPAN // 2
    if FORM == 4:
        c = tl.arange(0, HALF)[None, :]
        pair = tl.load(codes_ptr + row * (k // 2) + start // 2 + c, mask=inside[:, None], other=0)
        low = ((pair & 15).to(tl.float32) - zero[:, None]) * scale
        high = ((pair >> 4).to(tl.float32) - zero[:, None]) * scale
        tl.store(out_ptr + row * k + start + c, low.to(out_ptr.dtype.element_ty), mask=inside[:, None])
        tl.store(out_ptr + row * k + start + HALF + c, high.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        c = tl.arange(0, SPAN)[None, :]
        seen = inside[:, None] & (c < k - start)
        code = tl.load(codes_ptr + row * k + start + c, mask=seen, other=0)
        number = code if FORM == 8 else _numbers(code, FORM, False)
        value = (number.to(tl.float32) - zero[:, None]) * scale
        tl.store(out_ptr + row * k + start + c, value.to(out_ptr.dtype.element_ty), mask=seen)


def refuses(x: Tensor, weight: Packed) -> str | None:
    """Why PyTorch's product with the numbers of the whole matrix is the better one, or None."""
    tokens = x.numel() // x.shape[-1]
    if tokens > MOST_TOKENS or x.dtype not in DTYPES:
        return f"{tokens} tokens of {x.dtype}"
    if weight.span < LEAST_SPAN:
        return f"scales of {weight.group} columns"
    return None


def tile_of(n: int) -> tuple[int, int, int]:
    """Rows of a program, warps, stages, of n rows in all: not measured yet (`lab/scripts/packed_products.py`)."""
    return (64, 4, 4) if n >= 8192 else (32, 4, 5)


def packed_linear(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, tile: tuple[int, int, int] | None = None
) -> Tensor:
    """x `[.., tokens, k]`, in the order of the matrix's columns, times the matrix; at most 32 tokens."""
    n, k = len(weight.codes), weight.in_features
    flat = x.reshape(-1, k)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    tokens = len(flat)
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    bn, warps, stages = tile or tile_of(n)
    _packed[(triton.cdiv(n, bn),)](
        flat, weight.codes, *_scales(weight), out if bias is None else bias,
        out if residual is None else residual.contiguous(), out, tokens, n, k, flat.stride(0), **_layout(weight),
        BIAS=bias is not None, RESIDUAL=residual is not None, F16=x.dtype == torch.float16,
        M=16 if tokens <= 16 else 32, BN=bn, num_warps=warps, num_stages=stages, **options(tokens),
    )  # fmt: skip
    return out


def unpack(weight: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix as numbers, `[n, k]`."""
    n, k = len(weight.codes), weight.in_features
    out = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    layout = _layout(weight)
    _unpack[(triton.cdiv(k, layout["SPAN"]), triton.cdiv(n, 32))](
        weight.codes, *_scales(weight), out, n, k, **layout, BN=32, num_warps=4
    )
    return out


def _scales(weight: Packed) -> tuple[Tensor, Tensor]:
    return weight.scales, weight.scales if weight.zeros is None else weight.zeros


def _layout(weight: Packed) -> dict[str, int | bool]:
    return {
        "scale_row": weight.scales.stride(0), "GROUP": weight.group, "ROWS": weight.rows,
        "ZEROS": weight.zeros is not None, "FORM": FORMS[weight.form],
        "OFFSET": OFFSET[weight.form] if weight.zeros is None else 0, "SPAN": weight.span,
    }  # fmt: skip
