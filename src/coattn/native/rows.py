"""Rows into blocks and back, quantising and dequantising."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coattn.native.blocks import Blocks
from coattn.native.core import check, check_tensor, elem, element_of, extension


def _block_rows_job(k: Tensor, v: Tensor, blocks: Blocks) -> Any:
    check_tensor("k", k, [None, blocks.kv_heads, blocks.head_size])
    check_tensor("v", v, list(k.shape))
    check(k.dtype == v.dtype, f"k is {k.dtype} and v is {v.dtype}.", "Convert one of them.")
    job = extension.BlockRowsJob()
    blocks.fill(job)
    job.k, job.v, job.row_elem = k.data_ptr(), v.data_ptr(), elem(element_of(k.dtype))
    job.k_token, job.k_head = k.stride()[:2]
    job.v_token, job.v_head = v.stride()[:2]
    job.tokens, job.kv_heads, job.head_size = k.shape
    return job


def write_rows(k: Tensor, v: Tensor, slots: Tensor, blocks: Blocks) -> None:
    """Writes single tokens into float blocks, converting the element type.

    k, v: `[tokens, kv_heads, head_size]`. slots: `[tokens]` int64, block id * block + row.
    """
    job = _block_rows_job(k, v, blocks)
    check_tensor("slots", slots, [k.shape[0]], torch.int64)
    job.slots = slots.data_ptr()
    extension.write_rows(job)


def write_blocks(k: Tensor, v: Tensor, ids: Tensor, blocks: Blocks) -> None:
    """Writes whole blocks of any element type; int8 and int4 are quantised on the way.

    k, v: `[tokens, kv_heads, head_size]`. ids: `[ceil(tokens / block)]` int32. The last block may be partly filled.
    """
    job = _block_rows_job(k, v, blocks)
    check_tensor("ids", ids, [None], torch.int32)
    job.blocks, job.block_count = ids.data_ptr(), ids.shape[0]
    extension.write_blocks(job)


def read_blocks(ids: Tensor, tokens: int, blocks: Blocks, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values `[tokens, kv_heads, head_size]` of blocks; int8 and int4 are dequantised.

    ids: `[ceil(tokens / block)]` int32.
    """
    check_tensor("ids", ids, [None], torch.int32)
    k = torch.empty(tokens, blocks.kv_heads, blocks.head_size, dtype=dtype)
    v = torch.empty_like(k)
    job = _block_rows_job(k, v, blocks)
    job.blocks, job.block_count = ids.data_ptr(), ids.shape[0]
    extension.read_blocks(job)
    return k, v


def move_rows(from_rows: Tensor, to_rows: Tensor, row_bytes: int, from_value: int, to_value: int) -> None:
    """Copies single entries between blocks of float elements, all threads together.

    from_rows, to_rows: `[n]` int64 addresses of key rows of `row_bytes` each; the value row lies `from_value` and
    `to_value` bytes after its key row. Nothing is checked but shapes: the caller keeps both memories alive.
    """
    check_tensor("from_rows", from_rows, [None], torch.int64)
    check_tensor("to_rows", to_rows, list(from_rows.shape), torch.int64)
    job = extension.MoveRowsJob()
    job.from_rows, job.to_rows, job.count = from_rows.data_ptr(), to_rows.data_ptr(), len(from_rows)
    job.row_bytes, job.from_value, job.to_value = row_bytes, from_value, to_value
    extension.move_rows(job)
