"""What a decode step with residents reads and leaves behind: tensors at fixed addresses."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The table of a decode step, on its device: `[seqs]` int32 each but for the two lists `[seqs, n]`."""

    host_blocks: Tensor
    """Blocks in DRAM that may be picked."""
    host_lens: Tensor
    """Tokens in them; every one is full."""
    gpu_blocks: Tensor
    gpu_lens: Tensor
    seq: Tensor
    write_block: Tensor
    """The GPU block of the new token."""
    flush_to: Tensor
    """The block in DRAM that it becomes when it is full now; negative: it is not."""


@dataclass(frozen=True)
class Residents:
    """One layer's pool: place p of slot s is block `first + s * places + p` of GPU memory.

    held: `[slots + 1, kv_heads, places]` int32 block numbers, -1 for none; the last row is for padding rows.
    """

    held: Tensor
    first: int
    block: int
    sinks: int = 0
    """First blocks of a sequence that are always picked."""


@dataclass(frozen=True)
class Lists:
    """What one layer picked: `[seqs, kv_heads, ..]` each.

    Owner: the rule, one for each layer. Writer: `pick_blocks`. Readers:
    the attention of the same layer, the CPU's workers, `renew`; all before the next step begins.
    """

    gpu: Tensor
    """int32 GPU blocks: the residents that have left the window, picked or not, then the window."""
    gpu_lens: Tensor
    host: Tensor
    """int32 blocks in DRAM that were picked and are not resident; in mapped host memory where the CPU reads it."""
    host_lens: Tensor
    chosen: Tensor
    """int32 numbers of all picked blocks, rising."""
    wanted: Tensor
    """float32, of each chosen one: its score if it is missing, else -inf."""
    worth: Tensor
    """float32, of each place of the pool: the score of its block, inf if it was picked, -inf if there is none."""
