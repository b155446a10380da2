"""`attend` in C++: each key and value is read once for all queries of its group."""

import time
from functools import cache

import torch
from torch import Tensor

from coattn import native
from coattn.errors import WorkerError
from coattn.kernels.native.starved import starved
from coattn.kernels.quantise.blocks import PackedBlocks
from coattn.native import Attended, Blocks, Call
from coattn.state import AttnState
from coattn.types import BlockList

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuses(q: Tensor, blocks: Tensor | PackedBlocks) -> str | None:
    """Why the C++ kernels cannot take this call, or None."""
    memory = blocks.memory if isinstance(blocks, PackedBlocks) else blocks
    if q.device.type != "cpu" or memory.device.type != "cpu":
        return f"q lies on {q.device} and the blocks on {memory.device}, not in host memory"
    if q.dtype not in DTYPES or (memory is blocks and memory.dtype not in DTYPES):
        return f"q is {q.dtype} and the blocks are {memory.dtype}"
    if q.shape[-1] % 8:
        return f"head size {q.shape[-1]} is not a multiple of 8"
    if isinstance(blocks, PackedBlocks):
        return None
    _, _, _, block, head_dim = blocks.shape
    layout = native.block_layout(native.element_of(blocks.dtype), block, head_dim)
    packed = block * head_dim * blocks.element_size()
    if (layout.k, layout.v, layout.bytes) != (0, packed, 2 * packed) or not _own(blocks).is_contiguous():
        return f"blocks of {block} rows of {head_dim} {blocks.dtype} are not packed the way the kernels read them"
    return None


SHARED_SPIN_US = 20
"""How long workers spin when the model itself computes on the same cores: longer, and they take its time."""


@cache
def share_cores() -> None:
    """Keeps workers from spinning where the model needs the same cores. Once."""
    if not torch.cuda.is_available():
        native.set_spin_us(SHARED_SPIN_US)


DEADLINE_S = 1.5
"""How long a call may take before its workers are watched, beside the time its bytes need: lost ones fail in 1.8 s."""
WATCH_S = 0.3
"""Then its threads are watched for so long: where they get no processor time, the machine is busy, and nothing lost."""
PATIENCE_S = 60.0
"""How long such a machine is waited for."""
SLOWEST = 1e9
"""Bytes per second that the slowest machine is taken to read."""


def attend(q: Tensor, blocks: Tensor, picked: BlockList, scale: float, softcap: float | None) -> AttnState:
    """See `coattn.kernels.attend`; the call must not be refused."""
    if not len(blocks):
        return AttnState.empty(q)
    done = _plan(q, blocks, picked, scale, softcap).run()
    return AttnState(done.out, done.lse)


def attend_weighing(
    q: Tensor, blocks: Tensor, picked: BlockList, scale: float, softcap: float | None
) -> tuple[AttnState, Tensor]:
    """The same for one query token a sequence, and its weights `[seqs, q_heads, entries of the widest list]`."""
    done = _plan(q, blocks, picked, scale, softcap, weights=True).run()
    assert done.weights is not None
    return AttnState(done.out, done.lse), done.weights[:, 0]


def attend_in_time(
    q: Tensor, blocks: Tensor | PackedBlocks, picked: BlockList, scale: float, softcap: float | None
) -> AttnState:
    """The same on a thread of its own. Raises WorkerError when the workers fail or do not answer."""
    memory = blocks.memory if isinstance(blocks, PackedBlocks) else blocks
    if not len(memory):
        return AttnState.empty(q)
    pending = _plan(q, blocks, picked, scale, softcap).submit()
    block = blocks.block if isinstance(blocks, PackedBlocks) else blocks.shape[3]
    nbytes = int(picked.tokens.sum()) * memory[0].nbytes // block * max(1, q.shape[1])
    try:
        done = pending.wait(DEADLINE_S + nbytes / SLOWEST)
        end = time.monotonic() + PATIENCE_S
        while done is None and time.monotonic() < end and starved(WATCH_S):
            done = pending.wait(DEADLINE_S)
    except (native.NativeError, RuntimeError) as error:
        raise WorkerError(f"The CPU's part of a step failed: {error}.", LOST) from error
    if done is None:
        _abandoned.append(pending)
        native.abandon_pool()
        raise WorkerError("The CPU's workers did not answer in time.", LOST)
    return AttnState(done.out, done.lse)


LOST = "The next step runs with new workers. If the machine is busy with other work, try again when it is not."
_abandoned: list[object] = []
"""Calls whose workers may still touch their tensors: never freed."""


def _plan(
    q: Tensor,
    blocks: Tensor | PackedBlocks,
    picked: BlockList,
    scale: float,
    softcap: float | None,
    weights: bool = False,
) -> Call[Attended]:
    share_cores()
    return native.plan_attend(
        q,
        source(blocks),
        picked.table.contiguous(),
        picked.tokens.contiguous(),
        scale=scale,
        softcap=softcap or 0.0,
        owners=picked.owners,
        weights=weights,
    )


def source(blocks: Tensor | PackedBlocks) -> Blocks:
    """Blocks `[n, kv_heads, 2, block, d]`, or packed ones, as the extension knows them."""
    if isinstance(blocks, PackedBlocks):
        one = _own(blocks.memory)
        heads, single = blocks.memory.shape[1], one is not blocks.memory
        return native.Blocks(one.flatten(1), "int8", blocks.block, heads, blocks.d, single)
    _, kv_heads, _, block, d = blocks.shape
    own = _own(blocks)
    memory = own.view(torch.uint8).view(len(own), -1)
    return native.Blocks(memory, native.element_of(blocks.dtype), block, kv_heads, d, own is not blocks)


def _own(blocks: Tensor) -> Tensor:
    """Without the repetition over KV heads of blocks that belong to one each."""
    return blocks[:, :1] if blocks.shape[1] > 1 and blocks.stride(1) == 0 else blocks
