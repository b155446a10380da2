"""`bring` by bulk copies, which do not hold up the loads of what runs beside them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from coattn.ops.cuda.nvrtc import Int64, available, module
from coattn.ops.token_pool import FRESH, Moves, TokenPool

PROGRAMS = 16
"""Of one warp, with 8 KiB in each stage."""
STAGES = 3
_DEVICE_POINTER = 3
"""The driver's number of the attribute."""


def refuses(memory: Tensor, gpu: Tensor) -> str | None:
    """Why rows of `memory` cannot be copied so, or None."""
    if not available(gpu.device) or torch.cuda.get_device_capability(gpu.device)[0] < 9:
        return "made for compute capability 9"
    row = memory.shape[4] * memory.element_size()
    apart = memory.stride()[2:] != gpu.stride()[2:] or memory.stride(3) != memory.shape[4]
    if memory.dtype != gpu.dtype or row % 16 or apart or row > ROW_BYTES:
        return "rows have no form that fits"
    return None


ROW_BYTES = 512
"""Of a key at most: three stages of 16 of these and of their values are the shared memory that needs no permission."""


def bring(pool: TokenPool, memory: Tensor, table: Tensor, seq: Tensor, moves: Moves | None) -> None:
    """See `ops/token_pool.py`."""
    (slots, heads), (block, d), size = pool.clock.shape, memory.shape[3:], memory.element_size()
    lines, row = len(seq) * heads, d * size
    tokens, to, ends = (pool.coming, pool.next, pool.ends) if moves is None else moves
    form = {"ROW": row, "BLOCK": block, "FRESH": FRESH, "MOVES": int(moves is not None)}
    form["STAGES"] = min(STAGES, (44 << 10) // (32 * row))
    module("bring.cu", tuple(form.items()), pool.gpu.device).launch(
        "bring", (PROGRAMS, 1, 1), 32, Int64(device_pointer(memory)), table, seq, pool.gpu, to, tokens, pool.began,
        ends, heads, lines, pool.age.shape[-1], slots - 1, pool.first, Int64(memory.stride(0) * size),
        Int64(memory.stride(1) * size), Int64(table.stride(0)), Int64(pool.gpu.stride(0) * size),
        Int64(pool.gpu.stride(1) * size), shared=4 * lines,
    )  # fmt: skip


def device_pointer(x: Tensor) -> int:
    """Where a GPU finds memory of the host that is mapped for it."""
    if x.device.type == "cuda":
        return x.data_ptr()
    found = ctypes.c_uint64()
    code = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(
        ctypes.byref(found), _DEVICE_POINTER, ctypes.c_uint64(x.data_ptr())
    )
    if code:
        raise RuntimeError(f"memory of the host is not mapped: the CUDA driver answered with error {code}")
    return int(found.value)
