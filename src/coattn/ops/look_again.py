"""`look_again`: which KV heads were predicted so badly that the CPU attends once more."""

from __future__ import annotations

from torch import Tensor

from coattn.ops.reference.look_again import Doubts
from coattn.ops.reference.look_again import look_again as reference
from coattn.types import BlockList

__all__ = ["Doubts", "look_again"]


def look_again(predicted: Tensor, real: Tensor, bound: float, present: Tensor, far: BlockList, doubts: Doubts) -> None:
    """predicted, real `[seqs, q_heads, d]`; see the reference."""
    if real.device.type == "cuda":
        from coattn.ops.triton.look_again import look_again as kernel

        kernel(predicted, real, bound, present, far, doubts)
    else:
        reference(predicted, real, bound, present, far, doubts)
