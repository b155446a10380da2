"""`read_keys`: the keys of blocks in DRAM, without their values, on a layer's device."""

import torch
from torch import Tensor

from coattn.kernels.quantise.blocks import is_packed, unpack_blocks
from coattn.types import LayerShape


def read_keys(host: Tensor, ids: Tensor, shape: LayerShape, block: int) -> Tensor:
    """Blocks `ids` `[n]` int32 of host `[blocks, kv_heads, 2, block, d]`, or in 8 bits -> `[kv_heads, n * block, d]`.

    On a GPU a kernel reads them where they lie; in 8 bits keys and values are one piece, and both cross.
    """
    if is_packed(host):
        keys = unpack_blocks(host[ids.long()].to(shape.device), block, shape.head_dim, shape.dtype)[:, :, 0]
    elif shape.device.type == "cuda":
        from coattn.kernels.triton.read_keys import read_keys as kernel

        return kernel(host, ids.to(shape.device))
    else:
        keys = torch.stack([host[i, :, 0] for i in ids.tolist()]) if len(ids) else host[:0, :, 0]
    return keys.transpose(0, 1).flatten(1, 2)
