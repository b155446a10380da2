"""`append` of a recorded step: one new token a sequence, at places that stand in a frame."""

from __future__ import annotations

from torch import Tensor

from coattn.ops.reference.append import append as reference
from coattn.store.frame import Recording


def append(recording: Recording, near: Tensor, k: Tensor, v: Tensor, far: Tensor | None = None) -> None:
    """k, v `[rows, kv_heads, d]` into near `[n, kv_heads, 2, block, d]`; full blocks on to far."""
    spill = recording.spill if far is not None else None
    if near.device.type == "cuda":
        from coattn.ops.triton.append import append as kernel

        kernel(near, recording.ids, recording.places, k, v, far, spill)
    else:
        reference(near, recording.ids, recording.places, k, v, far, spill)
