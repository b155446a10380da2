"""`recall`: blocks from DRAM into a pool in GPU memory, each KV head its own."""

from torch import Tensor

from coattn.kernels.operation import Operation
from coattn.kernels.quantise.blocks import PackedBlocks, as_blocks, unpack_blocks


@Operation
def recall(gpu: Tensor, host: Tensor | PackedBlocks, to: Tensor, source: Tensor) -> None:
    """Block `source[s, h, i]` of `host` `[n, kv_heads, 2, block, d]`, KV head h, becomes block `to[s, h, i]` of `gpu`.

    to, source: `[seqs, kv_heads, m]` on the device of `gpu`; negative in `to`: nothing. No two share a place. Those of
    `host` may be in 8 bits, `[n, kv_heads, bytes]`.
    """
    heads = (to >= 0).nonzero()[:, 1]
    ids, wanted = to[to >= 0].long(), source[to >= 0].long()
    block, d = gpu.shape[3:]
    blocks = as_blocks(host, block, d)
    memory = blocks if isinstance(blocks, Tensor) else blocks.memory
    read = memory[wanted.to(memory.device), heads.to(memory.device)].to(gpu.device)
    gpu[ids, heads] = read if isinstance(blocks, Tensor) else unpack_blocks(read, block, d, gpu.dtype)
