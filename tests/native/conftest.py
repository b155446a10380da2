"""Shared by the native tests: building block stores, and attention in float64 and in the kernels' own precision."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coattn import native
from coattn.kernels.quantise.blocks import pack_blocks, unpack_blocks
from coattn.native.core import elem, extension

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
USABLE = [name for name, reason in native.isas().items() if not reason]


@pytest.fixture(scope="package", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """The references are tiny; torch's own threads would only fight the pool for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    native.force_isa(name)
    try:
        yield
    finally:
        native.force_isa(None)


def kernel_name(element: str, dtype: torch.dtype, group: int) -> str:
    """The kernel that `attend` uses for these types and so many queries a KV head."""
    return str(extension.attend_kernel_name(elem(element), elem(native.element_of(dtype)), group, 128))


def attend(*args: Any, **options: Any) -> native.Attended:
    return native.plan_attend(*args, **options).run()


@pytest.fixture(params=USABLE)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_isa(request.param):
        yield request.param


def pack(k: Tensor, v: Tensor, element: str, block: int) -> Tensor:
    """Rows `[tokens, kv_heads, head_size]` -> blocks `[n, kv_heads, bytes]`; rows that are not there hold NaN."""
    pad = -len(k) % block
    both = torch.stack([k, v])
    both = torch.cat([both, both[:, -1:].expand(-1, pad, -1, -1)], 1)  # rows that leave the scales as they are
    whole = both.unflatten(1, (-1, block)).permute(1, 3, 0, 2, 4)
    if element != "int8":
        whole = whole.to(DTYPES[element]).contiguous()
        whole[-1, :, :, block - pad :] = math.nan
        return whole.view(torch.uint8).flatten(2)
    packed, layout = pack_blocks(whole), native.block_layout(element, block, k.shape[2])
    packed[-1, :, : layout.k_scale].unflatten(-1, (2, block, -1))[:, :, block - pad :] = 0xFF
    scales = packed[-1, :, layout.v_scale : layout.v_scale + 4 * block].unflatten(-1, (2, block, 2))
    scales[:, :, block - pad :] = 0xFF
    return packed


def stored(blocks: native.Blocks, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """What listed blocks hold, as float32: k, v `[tokens, kv_heads, head_size]`."""
    memory = blocks.memory[ids.long()].unflatten(1, (blocks.kv_heads, -1))
    if blocks.element == "int8":
        both = unpack_blocks(memory, blocks.block, blocks.head_size, torch.float32)
    else:
        rows = memory[..., : 2 * blocks.block * blocks.layout.row_bytes].contiguous().view(DTYPES[blocks.element])
        both = rows.unflatten(-1, (2, blocks.block, blocks.head_size)).float()
    k, v = both.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :tokens]
    return k, v


def fill(rows: list[tuple[Tensor, Tensor]], element: str, block: int) -> tuple[native.Blocks, Tensor, Tensor]:
    """Rows (k, v) `[tokens, kv_heads, head_size]` of each sequence -> blocks in random order, table, tokens."""
    kv_heads, head_size = rows[0][0].shape[1:]
    counts = [len(k) for k, _ in rows]
    need = [-(-n // block) for n in counts]
    layout = native.block_layout(element, block, head_size)
    # three blocks nobody uses, and NaN everywhere: what is read without being written shows
    memory = torch.full((sum(need) + 3, kv_heads * layout.bytes), 0xFF, dtype=torch.uint8)
    blocks = native.Blocks(memory, element, block, kv_heads, head_size)
    order = torch.randperm(len(memory))[: sum(need)].int()
    table = torch.full((len(rows), 1, max([*need, 1])), -1, dtype=torch.int32)
    at = 0
    for seq, (k, v) in enumerate(rows):
        ids = order[at : at + need[seq]].contiguous()
        table[seq, 0, : need[seq]] = ids
        at += need[seq]
        if len(k):
            packed = pack(k, v, element, block)
            memory.unflatten(1, (kv_heads, -1))[ids.long(), :, : packed.shape[2]] = packed
    return blocks, table, torch.tensor(counts, dtype=torch.int32)[:, None].contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, *, scale: float | None = None, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain attention in `dtype`: q `[.., q_heads, d]`, k and v `[n, kv_heads, d]` -> out, lse, weights."""
    group = q.shape[-2] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    if len(k) == 0:
        empty = q.new_full(q.shape[:-1], -math.inf)
        return torch.zeros_like(q), empty, q.new_zeros(*q.shape[:-1], 0)
    s = torch.einsum("...hd,nhd->...hn", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    lse = s.logsumexp(-1)
    w = (s - lse[..., None]).exp()
    return torch.einsum("...hn,nhd->...hd", w, v), lse, w


def assert_close(got: Tensor, plain: Tensor, exact: Tensor, floor: float) -> None:
    """The kernel's error is at most twice that of plain attention in the same precision, plus a floor."""
    assert got.shape == exact.shape
    error = (got.double() - exact).abs().nan_to_num(0.0 if torch.isinf(exact).any() else math.inf)
    reference = (plain.double() - exact).abs().nan_to_num(0.0)
    # empty sets: lse -inf on both sides
    assert torch.equal(torch.isinf(got), torch.isinf(exact))
    if error.numel():
        assert error.max() <= 2 * reference.max() + floor, (error.max().item(), reference.max().item())


@pytest.fixture(scope="session")
def kv() -> SimpleNamespace:
    return SimpleNamespace(
        fill=fill, stored=stored, attention=attention, assert_close=assert_close, dtypes=DTYPES, usable=USABLE
    )
