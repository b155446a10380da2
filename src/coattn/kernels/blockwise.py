"""Reading a prompt block by block: each block attends to itself and to the anchor, the prompt's first tokens.

HCAttention, Appendix B, after Star Attention. What a prompt costs then grows with its length and not with its square.
The prompt's last tokens, the question, attend to everything; whoever runs the steps sees to that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.kernels.merge import with_sinks
from coattn.kernels.prefill import follow, prefill
from coattn.part import check_count
from coattn.types import LayerShape

QUESTION = 64
"""Tokens, where nobody says how many."""
NAMES = ("prefill_block", "anchor", "question")
HELP = {
    "prefill_block": "read prompts block by block, of so many tokens, each with the anchor; unset: as a whole",
    "anchor": "first tokens of a prompt that every block attends to; unset: a block",
    "question": f"last tokens of a prompt that attend to all of it; unset: {QUESTION}",
}


@dataclass(frozen=True)
class Blockwise:
    """Sizes in tokens. A prompt of one block is read exactly."""

    block: int
    anchor: int
    question: int = 0

    @staticmethod
    def of(block: int | None, anchor: int | None, question: int | None = None) -> Blockwise | None:
        """None where prompts are read as a whole. Raises ConfigError."""
        if block is None:
            for name, given in (("anchor", anchor), ("question", question)):
                if given is not None:
                    raise ConfigError(f"{name} is set, but prefill_block is not.", "Set prefill_block too.")
            return None
        check_count("prefill_block", block, 1)
        anchor = block if anchor is None else anchor
        check_count("anchor", anchor, 0)
        if anchor > block:
            raise ConfigError(f"anchor is {anchor}, but a block has {block} tokens.", f"Set anchor={block} or less.")
        question = QUESTION if question is None else question
        check_count("question", question, 0)
        return Blockwise(block, anchor, question)


class Prompt:
    """One layer of one sequence while its prompt is read: keys and values of the anchor and of the block so far."""

    def __init__(self, sizes: Blockwise) -> None:
        self.sizes = sizes
        self.length = 0
        self._anchor: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: LayerShape) -> Tensor:
        """The next tokens, q `[t, q_heads, d]`, k, v `[t, kv_heads, d]`, however they are cut -> like q."""
        parts, start = [], 0
        while start < len(q):
            left = self.sizes.block - self.length % self.sizes.block
            end = min(len(q), start + left)
            parts.append(self._piece(q[start:end], k[start:end], v[start:end], scale, layer))
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _piece(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: LayerShape) -> Tensor:
        if self.length % self.sizes.block == 0:
            self._own = []
        before = (self._anchor if self.length >= self.sizes.block else []) + self._own
        if not before:
            out = prefill(q, k, v, scale, layer)
        else:
            old_k, old_v = (torch.cat([pair[i] for pair in before]) for i in range(2))
            state = follow(q, k, v, old_k, old_v, scale, layer)
            out = with_sinks(state, q.dtype, layer.sink_logits).out.to(q.dtype)
        room = self.sizes.anchor - self.length
        if room > 0:
            self._anchor.append((k[:room].clone(), v[:room].clone()))
        if (self.length + len(q)) % self.sizes.block:
            self._own.append((k.clone(), v.clone()))
        self.length += len(q)
        return out
