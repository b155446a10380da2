"""What a request computes does not depend on who else runs.

The bits of a product of matrices, of attention and of what comes between may depend on how many rows there are, and on
where a prompt is cut. Prompts are read in chunks of one size, each by itself, and only what was read in whole chunks is
shared: so a prompt always makes the same calls with the same shapes. Captured decode steps run kernels that give a row
the same bits in any batch (`hf/invariant.py`); those that are not captured are a call for each sequence, here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coattn.engine.runner.runner import Runner
from coattn.errors import ConfigError, UnsupportedError
from coattn.hf.forward import Session
from coattn.step.runtime import Runtime

CHUNK_TOKENS, GPU_CHUNK_TOKENS = 512, 2048
"""Of prompts, in a step, unless said; on a GPU, where shorter ones are slower."""


class OneByOne(Runner):
    """A runner whose decode steps are calls of one sequence each."""

    def decode(self, slots: Sequence[int], tokens: Sequence[int], history: Sequence[int]) -> Tensor:
        rows: list[Tensor] = []
        try:
            for slot, token, stored in zip(slots, tokens, history, strict=True):
                rows.append(super().decode([slot], [token], [stored]).clone())
        except BaseException:
            for slot, stored in zip(slots[: len(rows)], history, strict=False):  # the others are as before the step
                self.runtime.truncate(slot, stored + 1, stored)
            raise
        return torch.cat(rows)


def check(session: Session, runtime: Runtime, chunk: int, target_ms: float | None) -> None:
    """Raises where answers would depend on who else runs all the same."""
    if not runtime.composed.exact or session.states:
        what = "a model with states" if session.states else f"the method {runtime.composed.method.name!r}"
        raise UnsupportedError(
            f"deterministic is for full, cpu and offload, and for models without states, not for {what}.",
            "Leave it out, or choose another.",
        )
    if target_ms is not None:
        raise ConfigError(
            "deterministic reads prompts in chunks of one size, and target_ms asks for others.", "Leave one out."
        )
    block = runtime.groups[-1].cache.block
    if chunk % block:
        raise ConfigError(
            f"deterministic needs a chunk of whole blocks, but {chunk} is no multiple of {block}.",
            f"Give chunk {max(block, chunk // block * block)}.",
        )
