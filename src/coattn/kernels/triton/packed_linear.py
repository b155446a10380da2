"""Linear layers whose weights stay in 4 to 8 bits: of a few tokens never unpacked in memory, else one at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

from coattn.kernels.quantise.weights import NARROW, OFFSET, TABLES, Packed, in_codes, table_of
from coattn.kernels.triton.launch import INTERPRETED, options

MOST_TOKENS = 32
LEAST_SPAN = 32
"""Columns that a matrix product of 16-bit numbers takes, twice."""
FORMS = {"int4": 4, "int5": 5, "int6": 6, "int8": 8, "fp8": 1} | dict.fromkeys(TABLES, 16)
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
def _scale(
    scale_ptr, super_ptr, g, rows, inside, scale_row, super_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Scales, or zeros, of group g of these rows."""
    found = tl.load(scale_ptr + g * scale_row + rows // ROWS, mask=inside, other=0)
    if KIND == 1:  # powers of two in 8 bits, those of float32's exponent; 0 is the one below it
        bits = tl.where(found == 0, 1 << 22, found.to(tl.int32) << 23)
        found = bits.to(tl.float32, bitcast=True)
    elif KIND == 2:
        several = tl.load(super_ptr + g * GROUP // 256 * super_row + rows, mask=inside, other=0.0)
        found = found.to(tl.float32) * several.to(tl.float32)
    return found.to(tl.float32)


@triton.jit
def _pairs(
    codes_ptr, high_ptr, table_ptr, rows, inside, start, code_row, code_span, high_row, high_span,
    FORM: tl.constexpr, F16: tl.constexpr, SPAN: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Numbers `[BN, SPAN / 2]` of the first and of the second half of the span at column `start`; those of integers
    are greater by 128, or by 1024 in float16, where they are SHIFTED."""
    HALF: tl.constexpr = SPAN // 2
    c = tl.arange(0, HALF)[None, :]
    span, row = tl.full([1, 1], 0, tl.int64) + start // SPAN, rows.to(tl.int64)[:, None]
    at = codes_ptr + span * code_span + row * code_row + c
    pair = tl.load(at, mask=inside[:, None], other=0, eviction_policy="evict_first")
    if FORM == 16:
        low = tl.load(table_ptr + (pair & 15).to(tl.int32))
        high = tl.load(table_ptr + (pair >> 4).to(tl.int32))
    elif FORM == 4:
        if SHIFTED:
            low, high = _halves(pair, F16)
        else:
            low, high = pair & 15, pair >> 4
    else:
        BITS: tl.constexpr = FORM - 4
        BYTES: tl.constexpr = SPAN * BITS // 8
        MASK: tl.constexpr = (1 << BITS) - 1
        at = high_ptr + span * high_span + row * high_row + c % BYTES
        above = tl.load(at, mask=inside[:, None], other=0)
        shift = (c // BYTES * BITS).to(tl.uint8)
        low = (pair & 15) | (((above >> shift) & MASK) << 4)
        high = (pair >> 4) | (((above >> shift >> 4) & MASK) << 4)
        if SHIFTED:
            low, high = _numbers(low, 4, F16), _numbers(high, 4, F16)
    return low, high


@triton.jit
def _product(
    x_at, token, codes_ptr, high_ptr, scale_ptr, super_ptr, zero_ptr, table_ptr, rows, n, k,
    code_row, code_span, high_row, high_span, scale_row, super_row, super_zero,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr,
    OFFSET: tl.constexpr, F16: tl.constexpr, SPAN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`[M, BN]`: inputs at `x_at [M, 1]`, where `token [M, 1]` says so, times rows of weights. A span's product is that
    of its codes; scales and zeros come afterwards."""
    inside = rows < n
    HALF: tl.constexpr = SPAN // 2
    TWO: tl.constexpr = FORM != 8 and FORM != 1 and GROUP == SPAN // 2
    acc = tl.zeros([M, BN], tl.float32)
    # what zeros take away is a sum of inputs: as a product with ones every thread has those of its own outputs
    ones = tl.full([HALF if TWO else SPAN, BN], 1.0, x_at.dtype.element_ty)
    bias = 0.0
    if FORM == 4 or FORM == 5 or FORM == 6:
        bias = OFFSET + (1024.0 if F16 else 128.0)
    elif ZEROS == 0:
        bias = OFFSET * 1.0
    MINS: tl.constexpr = 2 if ZEROS == 3 else 0
    # scales and zeros of the next span are on their way while this one is computed
    scale = _scale(scale_ptr, super_ptr, 0, rows, inside, scale_row, super_row, GROUP, ROWS, KIND)
    zero = scale
    if ZEROS != 0:
        zero = _scale(zero_ptr, super_ptr + super_zero, 0, rows, inside, scale_row, super_row, GROUP, ROWS, MINS)
    for start in range(0, k, SPAN):
        more = rows < tl.where(start + SPAN < k, n, 0)
        g = (start + SPAN) // GROUP
        next_scale = _scale(scale_ptr, super_ptr, g, rows, more, scale_row, super_row, GROUP, ROWS, KIND)
        next_zero = next_scale
        if ZEROS != 0:
            next_zero = _scale(zero_ptr, super_ptr + super_zero, g, rows, more, scale_row, super_row, GROUP, ROWS, MINS)
        part = tl.zeros([M, BN], tl.float32)
        total = tl.zeros([M, BN], tl.float32)
        if FORM == 8 or FORM == 1:
            c = tl.arange(0, SPAN)[None, :]
            at = codes_ptr + rows.to(tl.int64)[:, None] * code_row + start + c
            code = tl.load(at, mask=inside[:, None] & (c < k - start), other=0, eviction_policy="evict_first")
            x = tl.load(x_at + start + c, mask=token & (c < k - start), other=0.0)
            part = tl.dot(x, tl.trans(_numbers(code, FORM, F16)), part)
            if ZEROS != 0:
                total = tl.dot(x, ones)
        else:
            c = tl.arange(0, HALF)[None, :]
            low = tl.load(x_at + start + c, mask=token, other=0.0)
            high = tl.load(x_at + start + HALF + c, mask=token, other=0.0)
            one, other = _pairs(
                codes_ptr, high_ptr, table_ptr, rows, inside, start, code_row, code_span, high_row, high_span,
                FORM, F16, SPAN, True,
            )  # fmt: skip
            part = tl.dot(low, tl.trans(one), part)
            if TWO:
                second = _scale(scale_ptr, super_ptr, start // GROUP + 1, rows, inside, scale_row, super_row,
                                GROUP, ROWS, KIND)  # fmt: skip
                taken = tl.full([BN], 0.0, tl.float32) + bias
                if ZEROS == 1:
                    taken += _scale(zero_ptr, super_ptr, start // GROUP + 1, rows, inside, scale_row, super_row,
                                    GROUP, ROWS, 0)  # fmt: skip
                half = tl.dot(high, tl.trans(other))
                if FORM != 16:
                    total = tl.dot(low, ones)
                    half -= tl.dot(high, ones) * taken[None, :]
                acc += half * second[None, :]
            else:
                part = tl.dot(high, tl.trans(other), part)
                if FORM != 16:
                    # loaded once more, for a product whose operands lie in other registers
                    both = tl.arange(0, SPAN)[None, :]
                    total = tl.dot(tl.load(x_at + start + both, mask=token, other=0.0), ones)
        taken = tl.full([BN], 0.0, tl.float32) + bias
        if ZEROS == 1:
            taken += zero
        if ZEROS == 1 or (FORM != 8 and FORM != 1 and FORM != 16):
            part -= total * taken[None, :]
        acc += part * scale[None, :]
        if ZEROS >= 2:
            acc -= total * zero[None, :]
        scale, zero = next_scale, next_zero
    return acc


@triton.jit
def _packed(
    x_ptr, codes_ptr, high_ptr, scale_ptr, super_ptr, zero_ptr, table_ptr, b_ptr, r_ptr, out_ptr, m, n, k, x_row,
    code_row, code_span, high_row, high_span, scale_row, super_row, super_zero,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr, F16: tl.constexpr, SPAN: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """BN rows of weights for all tokens."""
    if FOLLOW:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = rows < n
    t = tl.arange(0, M)
    token = (t < m)[:, None]
    acc = _product(
        x_ptr + t[:, None] * x_row, token, codes_ptr, high_ptr, scale_ptr, super_ptr, zero_ptr, table_ptr, rows, n, k,
        code_row, code_span, high_row, high_span, scale_row, super_row, super_zero,
        GROUP, ROWS, ZEROS, KIND, FORM, OFFSET, F16, SPAN, M, BN,
    )  # fmt: skip
    if BIAS:
        acc += tl.load(b_ptr + rows, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = acc.to(out_ptr.dtype.element_ty)
    at = t[:, None] * n + rows[None, :]
    if RESIDUAL:
        y = tl.load(r_ptr + at, mask=token & inside[None, :], other=0.0) + y
    tl.store(out_ptr + at, y, mask=token & inside[None, :])


@triton.jit
def _unpack(
    codes_ptr, high_ptr, scale_ptr, super_ptr, zero_ptr, table_ptr, out_ptr, n, k,
    code_row, code_span, high_row, high_span, scale_row, super_row, super_zero,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr,
    OFFSET: tl.constexpr, SPAN: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One span of BN rows as numbers."""
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = rows < n
    start = tl.program_id(0) * SPAN
    row = rows.to(tl.int64)[:, None]
    HALF: tl.constexpr = SPAN // 2
    WIDE: tl.constexpr = FORM == 8 or FORM == 1
    MINS: tl.constexpr = 2 if ZEROS == 3 else 0
    WIDTH: tl.constexpr = SPAN if WIDE else HALF
    c = tl.arange(0, WIDTH)[None, :]
    if not WIDE:
        pairs = _pairs(
            codes_ptr, high_ptr, table_ptr, rows, inside, start, code_row, code_span, high_row, high_span,
            FORM, False, SPAN, False,
        )  # fmt: skip
    for half in tl.static_range(0, 1 if WIDE else 2):
        g = (start + half * HALF) // GROUP
        scale = _scale(scale_ptr, super_ptr, g, rows, inside, scale_row, super_row, GROUP, ROWS, KIND)[:, None]
        seen = inside[:, None] & (c < k - start - half * HALF)
        if WIDE:
            code = tl.load(codes_ptr + row * code_row + start + c, mask=seen, other=0)
            number = (code if FORM == 8 else _numbers(code, FORM, False)).to(tl.float32)
        else:
            number = pairs[half].to(tl.float32)
        if ZEROS != 0:
            zero = _scale(zero_ptr, super_ptr + super_zero, g, rows, inside, scale_row, super_row, GROUP, ROWS, MINS)[
                :, None
            ]
        if ZEROS == 0:
            value = (number - OFFSET) * scale
        elif ZEROS == 1:
            value = (number - zero) * scale
        else:
            value = number * scale - zero
        at = out_ptr + row * k + start + half * HALF + c
        tl.store(at, value.to(out_ptr.dtype.element_ty), mask=seen)


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
    n, k = weight.out_features, weight.in_features
    flat = x.reshape(-1, k)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    tokens = len(flat)
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    bn, warps, stages = tile or tile_of(n)
    _packed[(triton.cdiv(n, bn),)](
        flat, *tensors_of(weight, x.dtype), out if bias is None else bias,
        out if residual is None else residual.contiguous(), out, tokens, n, k, flat.stride(0), **layout_of(weight),
        BIAS=bias is not None, RESIDUAL=residual is not None, F16=x.dtype == torch.float16,
        M=16 if tokens <= 16 else 32, BN=bn, num_warps=warps, num_stages=stages, **options(tokens),
    )  # fmt: skip
    return out


def unpack(weight: Packed, dtype: torch.dtype, tile: tuple[int, int] = (32, 4)) -> Tensor:
    """The matrix as numbers, `[n, k]`. tile: rows of a program, and its warps."""
    n, k = weight.out_features, weight.in_features
    out = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    layout, (bn, warps) = layout_of(weight), tile
    _unpack[(triton.cdiv(k, layout["SPAN"]), triton.cdiv(n, bn))](
        *tensors_of(weight, torch.float32), out, n, k, **layout, BN=bn, num_warps=warps
    )
    return out


def tensors_of(weight: Packed, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What kernels read; those that a form has not are others. dtype: of the numbers in a table."""
    codes, scales = weight.codes, weight.scales
    table = table_of(weight.form, codes.device, dtype) if weight.form in TABLES else codes
    high, supers, zeros = weight.high, weight.supers, weight.zeros
    return (
        codes, codes if high is None else high, scales, scales if supers is None else supers,
        scales if zeros is None else zeros, table,
    )  # fmt: skip


def layout_of(weight: Packed) -> dict[str, int | bool]:
    """Strides, and what kernels are compiled for."""
    codes, high, supers = weight.codes, weight.high, weight.supers
    narrow, zeros = weight.form in NARROW, 0
    if weight.zeros is not None:
        zeros = 1 if in_codes(weight) else 2 if supers is None else 3
    return {
        "code_row": codes.stride(-2), "code_span": codes.stride(-3) if narrow else 0,
        "high_row": 0 if high is None else high.stride(-2), "high_span": 0 if high is None else high.stride(-3),
        "scale_row": weight.scales.stride(-2), "super_row": 0 if supers is None else supers.stride(-2),
        "super_zero": 0 if supers is None else supers.stride(-3) * (supers.shape[-3] - 1),
        "GROUP": weight.group, "ROWS": weight.rows, "ZEROS": zeros,
        "KIND": 2 if supers is not None else 1 if weight.scales.dtype == torch.uint8 else 0,
        "FORM": FORMS[weight.form], "OFFSET": OFFSET.get(weight.form, 0) if zeros == 0 else 0, "SPAN": weight.span,
    }  # fmt: skip
