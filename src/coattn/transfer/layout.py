"""Where everything of one prompt lies in one piece of memory, the same on both sides, and whether the sides fit.

    layer 0: K [tokens, kv_heads, d] | V like K | last queries [queries, q_heads, d]
    layer 1: ...
    logits [vocabulary] float32

Each begins at a multiple of 64 bytes. Owner: the decode side. Writer: the prefill side, rows of one layer at a time,
each once, until it says `done` or its lease is over. Reader: the decode side, each row after the frame that names it,
which is sent after the row was written. The memory serves one prompt and is never used for another, so a writer that is
late writes to memory that is no longer read.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.hf.prefilled import QUERIES, Prefilled
from coattn.transfer.channel import Frame
from coattn.types import LayerShape

ALIGN = 64
FORMAT = 3
COMPARED = ("configuration", "weights", "tokenizer")
"""Fingerprints that both sides must have alike. The configuration has the rotary embedding, the weights their dtype."""


class Span(NamedTuple):
    """A tensor somewhere in the memory."""

    offset: int
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """The tensor as a view of `memory` uint8."""
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.size)


class Layout:
    """Offsets in bytes. Made of what both sides have compared: the shapes of the layers and of the vocabulary."""

    def __init__(self, shapes: Sequence[LayerShape], vocabulary: int, tokens: int) -> None:
        self.shapes, self.vocabulary, self.tokens = tuple(shapes), vocabulary, tokens
        self.queries = min(tokens, QUERIES)
        self._starts: list[list[int]] = []
        end = 0
        for shape in self.shapes:
            kv = tokens * shape.token_bytes // 2
            self._starts.append([])
            for size in (kv, kv, self.queries * shape.q_heads * shape.head_dim * shape.dtype.itemsize):
                self._starts[-1].append(end)
                end += -(-size // ALIGN) * ALIGN
        self._logits = end
        self.size = end + 4 * vocabulary
        """Bytes in all."""

    def rows(self, layer: int, start: int, end: int) -> list[Span]:
        """K and V of the tokens `start .. end`."""
        shape = self.shapes[layer]
        before, size = start * shape.token_bytes // 2, (end - start, shape.kv_heads, shape.head_dim)
        return [Span(base + before, size, shape.dtype) for base in self._starts[layer][:2]]

    def last(self) -> list[Span]:
        """What is known when all tokens are: the last queries of every layer, and the logits."""
        pairs = zip(self.shapes, self._starts, strict=True)
        spans = [Span(starts[2], (self.queries, s.q_heads, s.head_dim), s.dtype) for s, starts in pairs]
        return [*spans, Span(self._logits, (1, self.vocabulary), torch.float32)]

    def prefilled(self, memory: Tensor, tokens: Sequence[int], scales: Sequence[float], read_by: str) -> Prefilled:
        """The prompt, where it lies: its tensors keep the memory."""
        whole = [self.rows(i, 0, self.tokens) for i in range(len(self.shapes))]
        kv = tuple((k.of(memory), v.of(memory)) for k, v in whole)
        *queries, logits = (span.of(memory) for span in self.last())
        return Prefilled(tuple(tokens), kv, tuple(queries), tuple(scales), logits, read_by, transferred=True)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in DRAM, where they lie."""
    held: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(held)


def introduce(fingerprints: Mapping[str, str], layers: Sequence[LayerShape], vocabulary: int) -> Frame:
    """The first frame of a caller. Its shapes are what a `Layout` is made of."""
    return {
        "op": "open",
        "format": FORMAT,
        "fingerprints": {name: fingerprints[name] for name in COMPARED},
        "shapes": [vocabulary, *([s.kv_heads, s.q_heads, s.head_dim, str(s.dtype)] for s in layers)],
    }


def mismatch(theirs: Frame, own: Frame) -> str | None:
    """Why a caller that introduced itself so is not read for; None where it is."""
    if theirs["op"] != "open" or theirs.get("format") != FORMAT:
        return f"It speaks another version than {FORMAT} of this protocol."
    known = theirs.get("fingerprints")
    wrong = [k for k in COMPARED if not isinstance(known, dict) or known.get(k) != own["fingerprints"][k]]
    if wrong:
        return f"It has another {' and another '.join(wrong)}."
    return None if theirs.get("shapes") == own["shapes"] else "Its layers have other shapes or another dtype."
