"""What travels through a step: its phase and lengths, the shape of a layer, what is selected."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coattn.errors import MethodError

if TYPE_CHECKING:
    from coattn.quantise.blocks import PackedBlocks


class Phase(enum.Enum):
    """What a step does. A field of the step, never guessed from shapes further down."""

    PREFILL = "prefill"
    """No sequence has history; attention is dense over the step's own tokens."""
    APPEND = "append"
    """Several new tokens after a history: a new turn, or a later chunk of a prompt."""
    DECODE = "decode"
    """Exactly one new token for every sequence."""


@dataclass(frozen=True)
class Step:
    """One forward call: which sequences, what they had, what they add.

    Tokens travel packed: `[tokens, heads, head_dim]`, sequence after sequence, no padding. All three tuples have one
    entry per sequence of the step.
    """

    phase: Phase
    slots: tuple[int, ...]
    """Which row of the stores each sequence owns."""
    history: tuple[int, ...]
    """Tokens stored before this step."""
    new: tuple[int, ...]
    """Tokens this step adds; zero is allowed outside decode."""

    @staticmethod
    def of(slots: tuple[int, ...], history: tuple[int, ...], new: tuple[int, ...]) -> Step:
        """A step with the phase that its lengths say."""
        if not any(history):
            phase = Phase.PREFILL
        elif all(n == 1 for n in new):
            phase = Phase.DECODE
        else:
            phase = Phase.APPEND
        return Step(phase, slots, history, new)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence after the step."""
        return tuple(h + n for h, n in zip(self.history, self.new, strict=True))

    @cached_property
    def tokens(self) -> int:
        """Packed tokens in the step."""
        return sum(self.new)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where each sequence's tokens lie in the packed tensors: `[start, end)`."""
        ends, total = [], 0
        for n in self.new:
            ends.append((total, total + n))
            total += n
        return tuple(ends)

    @property
    def seqs(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class LayerShape:
    """What the stores and the attention of one layer need to know of the model."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None = None
    """Tokens a query may look back, itself included; None for all."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)` before the softmax."""
    mark: float | None = None
    """A number of the layer's own weights: files that were made for a model are told by it from another's."""

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in this layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class BlockList:
    """Some blocks of one block memory, per sequence and (where they differ) per KV head.

    table: `[seqs, lists, blocks]` int32 block ids; `lists` is 1 (the same for every KV head) or kv_heads.
    tokens: `[seqs, lists]` int32, entries attended: every listed block is full but the last, which may be partial.
    Entries of `table` past the last needed block are ignored.
    """

    table: Tensor
    tokens: Tensor
    longest: int
    """The largest entry of `tokens`, known on the host: the loop bound of a kernel."""
    memory: Tensor | PackedBlocks | None = None
    """`[n, kv_heads, 2, block, head_dim]`, or blocks in 8 bits: those that are listed, where they are not the store's
    own; with a stride of zero between KV heads where a block belongs to one head, whichever lists it."""
    owners: Tensor | None = None
    """`[seqs]` int32 on the host: the row of `table` and `tokens` of each sequence, where it is not its own number."""
    on_host: BlockList | None = None
    """The same list in host memory, where this one is on a GPU and the CPU may be asked to attend."""

    def in_reach(self, rows: int) -> BlockList:
        """The list in host memory if it has one there, one row for each of a step's `rows` sequences."""
        found = self if self.on_host is None else self.on_host
        if found.owners is not None:
            own = found.owners[:rows].long()
            found = replace(found, table=found.table[own], tokens=found.tokens[own], owners=None)
        return replace(found, table=found.table[:rows], tokens=found.tokens[:rows])


@dataclass(frozen=True)
class Weighted:
    """Single entries in DRAM and what they weigh: which, per sequence and KV head; how much, per query head.

    Tensors on the host; where a GPU selected them, there.

    table: `[seqs, 1, blocks]` int32 arena block ids of each sequence, on the host.
    index: `[seqs, kv_heads, n]` int32 positions in the sequence; count: `[seqs, kv_heads]` int32, how many are in use.
    weights: `[seqs, q_heads, n]` float32 shares of `exp(lse)`; zero where a query head leaves an entry to its group,
    and past the count.
    lse: `[seqs, q_heads]` float32. So the sum of values under the weights, with this lse, is an AttnState: over the
    entries alone where the weights add up to one, over everything far with the others' values as zero where less.
    """

    table: Tensor
    index: Tensor
    count: Tensor
    weights: Tensor
    lse: Tensor
    others: Tensor | None = None
    """`[seqs, q_heads]` float32 lse of the far entries that were left out; set where the weights are to be computed
    again from the entries' own keys, which then lie beside the values. -inf: they do not count."""


@dataclass(frozen=True)
class Selection:
    """What is attended in one layer of one step, split by where it lies; None: nothing there."""

    near: BlockList | None = None
    """In the GPU tier: a pool of resident blocks, or a window of recent ones."""
    far: BlockList | None = None
    """In the arena, in DRAM."""
    weighted: Weighted | None = None
    """In the arena too: entries whose weights are known before anybody looks at them."""
    tail: Tensor | None = None
    """`[seqs, q_heads]` float32 lse of what was left out but counts, each with the mean of all values."""


def require_covered(picked: Selection, covers: Collection[str], rule: str) -> None:
    """Raises MethodError unless every part of a selection is covered by a place."""
    for part in fields(picked):
        if getattr(picked, part.name) is not None and part.name not in covers:
            raise MethodError(
                f"Rule {rule!r} selected entries as {part.name!r}, which none of the row's places attends to.",
                f"Add a place that covers {part.name!r}, or change the rule: `coattn methods` shows rows that fit.",
            )
