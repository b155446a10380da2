"""What travels through a step: its phase and lengths, the shape of a layer, what is selected."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

Tier = Literal["gpu", "host"]


class Phase(enum.Enum):
    """What a step does. A field of the step, never guessed from shapes further down."""

    PREFILL = "prefill"
    """No sequence has history; attention is dense over the step's own tokens."""
    EXTEND = "extend"
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
    """The number by which the cache knows each sequence."""
    history: tuple[int, ...]
    """Tokens stored before this step."""
    new: tuple[int, ...]
    """Tokens this step adds; zero is allowed outside decode."""
    more: frozenset[int] = frozenset()
    """Slots whose prompt goes on after this step, where the caller knows."""

    @staticmethod
    def of(slots: tuple[int, ...], history: tuple[int, ...], new: tuple[int, ...]) -> Step:
        """A step with the phase that its lengths say."""
        if not any(history):
            phase = Phase.PREFILL
        elif all(n == 1 for n in new):
            phase = Phase.DECODE
        else:
            phase = Phase.EXTEND
        return Step(phase, slots, history, new)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence after the step."""
        return tuple(h + n for h, n in zip(self.history, self.new, strict=True))

    @cached_property
    def visible(self) -> tuple[int, ...]:
        """Stored tokens of each sequence that the step's queries see: in decode with the new one, else the history."""
        return self.lengths if self.phase is Phase.DECODE else self.history

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

    def alone(self, i: int) -> Step:
        """The same step for its i-th sequence only."""
        return Step(self.phase, self.slots[i : i + 1], self.history[i : i + 1], self.new[i : i + 1], self.more)


@dataclass(frozen=True)
class Rope:
    """How a layer's keys and queries are turned by their positions."""

    frequencies: tuple[float, ...]
    """Of each pair of channels the angle, in radians a position; none: they change with the length of the text."""
    interleaved: bool = False
    """Whether neighbours are a pair; else channel i and channel `i + len(frequencies)`."""


@dataclass(frozen=True)
class LayerShape:
    """What the cache and the attention of one layer need to know of the model."""

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
    rope: Rope | None = None
    """None: keys know nothing of positions, or nobody said what."""
    stage: int = 0
    """Which of an engine's devices it lies on, counted from zero; two may be the same one."""
    sink_logits: Tensor | None = field(default=None, compare=False, repr=False)
    """`[q_heads]` float32 on the device, learned (gpt-oss): a score of each query head that is one more term of its
    softmax and has no value. Nobody writes to it: captured steps read it where it lies."""

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in this layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class StateShape:
    """A tensor of one sequence in a layer that has a state instead of a KV cache."""

    name: str
    """The layer's number in the model, the kind of state, its number: `0.recurrent.0`."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PackedMemory(Protocol):
    """Blocks in fewer bits than the model's own numbers; `kernels.quantise.blocks.PackedBlocks` are."""

    @property
    def memory(self) -> Tensor: ...
    @property
    def block(self) -> int: ...
    @property
    def d(self) -> int: ...


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
    memory: Tensor | PackedMemory | None = None
    """`[n, kv_heads, 2, block, head_dim]`, or blocks in 8 bits: those that are listed, where they are not the cache's
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
class BlockWork:
    """Attention over listed blocks of one tier."""

    tier: Tier
    blocks: BlockList

    @property
    def kind(self) -> str:
        return self.tier


@dataclass(frozen=True)
class RowWork:
    """Single entries in DRAM and what they weigh: which, per sequence and KV head; how much, per query head.

    Tensors on the host; where a GPU selected them, there.

    table: `[seqs, 1, blocks]` int32 host block ids of each sequence, on the host.
    index: `[seqs, kv_heads, n]` int32 positions in the sequence; count: `[seqs, kv_heads]` int32, how many are in use.
    weights: `[seqs, q_heads, n]` float32 shares of `exp(lse)`; zero where a query head leaves an entry to its group,
    and past the count.
    lse: `[seqs, q_heads]` float32. So the sum of values under the weights, with this lse, is an AttnState.
    """

    kind = "rows"
    table: Tensor
    index: Tensor
    count: Tensor
    weights: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Term:
    """A part of the result that the rule knows already: out `[seqs, 1, q_heads, d]`, lse `[seqs, 1, q_heads]`."""

    kind = "term"
    out: Tensor
    lse: Tensor


class Work(Protocol):
    """A piece of work: which entries a layer attends to. An executor runs it that has its kind in `runs`.

    Kinds of coattn's own parts: `gpu` and `host`, blocks of a tier; `rows`; `term`. Other parts bring others.
    """

    @property
    def kind(self) -> str: ...


def nothing_to_wait_for() -> None:
    """What a callback is where nobody gave one."""


@dataclass(frozen=True)
class Selection:
    """What is attended in one layer of one step, as disjoint pieces of work. A kind occurs at most once."""

    works: tuple[Work, ...] = ()

    @staticmethod
    def of(gpu: BlockList | None = None, host: BlockList | None = None, *more: Work) -> Selection:
        """Lists of each tier, where there is one, and whatever else."""
        lists: list[tuple[Tier, BlockList | None]] = [("gpu", gpu), ("host", host)]
        return Selection((*(BlockWork(tier, found) for tier, found in lists if found is not None), *more))

    @property
    def gpu(self) -> BlockList | None:
        """Blocks in GPU memory."""
        return self._blocks("gpu")

    @property
    def host(self) -> BlockList | None:
        """Blocks in DRAM."""
        return self._blocks("host")

    @property
    def rows(self) -> RowWork | None:
        """Weighted rows in DRAM."""
        return next((work for work in self.works if isinstance(work, RowWork)), None)

    def _blocks(self, tier: Tier) -> BlockList | None:
        return next((work.blocks for work in self.works if isinstance(work, BlockWork) and work.tier == tier), None)
