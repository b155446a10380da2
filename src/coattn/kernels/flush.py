"""`flush`: of blocks that a decode step has filled, their values on to DRAM, their keys into an index."""

import torch
from torch import Tensor

from coattn.kernels.operation import Operation
from coattn.kernels.quantise.values import LEVELS, ValueBlocks, pack_values


def flush_values(gpu: Tensor, values: ValueBlocks, block: Tensor, flush_to: Tensor) -> None:
    """Values of blocks `block` `[rows]` of gpu `[n, kv_heads, 2, size, d]` to blocks `flush_to`, unless negative."""
    if gpu.device.type == "cuda":
        from coattn.kernels.triton.flush import flush_rows

        halves = values.memory if values.form == "model" else values.memory.view(torch.float16)
        flush_rows(gpu, values.memory, halves, block, flush_to, LEVELS.get(values.form, 0))
        return
    full = (flush_to >= 0).nonzero()[:, 0]
    if len(full):
        made = gpu[block[full].long()][:, :, 1]
        made = made if values.form == "model" else pack_values(made, values.form)
        values.memory[flush_to[full].long()] = made.to(values.memory.device, values.memory.dtype)


@Operation
def sum_values(gpu: Tensor, sums: Tensor, block: Tensor, flush_to: Tensor, seq: Tensor) -> None:
    """Values of blocks that are full now, and their number, to `sums[seq]` `[seqs + 1, kv_heads, d + 1]` float32."""
    full = (flush_to >= 0).nonzero()[:, 0]
    if len(full):
        values = gpu[block[full].long()][:, :, 1].float()
        sums[seq[full].long(), :, :-1] += values.sum(2)
        sums[seq[full].long(), :, -1] += values.shape[2]


def flush_keys(gpu: Tensor, kept: Tensor, block: Tensor, flush_to: Tensor) -> None:
    """Keys of blocks that are full now to blocks `flush_to` of kept `[n, kv_heads, size, d]`."""
    if gpu.device.type == "cuda":
        from coattn.kernels.triton.flush import flush_rows

        flush_rows(gpu, kept, kept, block, flush_to, 0, kind=0)
        return
    full = (flush_to >= 0).nonzero()[:, 0]
    kept[flush_to[full].long()] = gpu[block[full].long()][:, :, 0]
