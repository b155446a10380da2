"""Shared by the native tests: building block stores, and attention in float64 and in the kernels' own precision."""

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from coattn import native

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
USABLE = [status.name for status in native.isas() if not status.reason]


@pytest.fixture(scope="package", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """The references are tiny; torch's own threads would only fight the pool for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=USABLE)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.forced_isa(request.param):
        yield request.param


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
            native.write_blocks(k, v, ids, blocks)
    return blocks, table, torch.tensor(counts, dtype=torch.int32)[:, None].contiguous()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain attention in `dtype`: q `[.., q_heads, d]`, k and v `[n, kv_heads, d]` -> out, lse, weights."""
    group = q.shape[-2] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    if len(k) == 0 and sinks is None:
        empty = q.new_full(q.shape[:-1], -math.inf)
        return torch.zeros_like(q), empty, q.new_zeros(*q.shape[:-1], 0)
    s = torch.einsum("...hd,nhd->...hn", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    every = s if sinks is None else torch.cat([s, sinks.to(dtype)[:, None].expand(*s.shape[:-1], 1)], -1)
    lse = every.logsumexp(-1)
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
    return SimpleNamespace(fill=fill, attention=attention, assert_close=assert_close, dtypes=DTYPES, usable=USABLE)
