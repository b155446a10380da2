"""The mailbox of a step in which the CPU attends to single entries: positions and queries there, states back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn import native
from coattn.cache.host_memory import host_memory
from coattn.cache.step_table import StepTable
from coattn.errors import UnsupportedError
from coattn.handover.box import LINE, Box
from coattn.handover.server import DEADLINE_S, Server
from coattn.ops.native.attend import refuses, source
from coattn.quantise.blocks import PackedBlocks
from coattn.state import Split
from coattn.types import LayerShape

EVERY = 8
"""Steps between two looks at who was waited for."""
NEARLY = 0.05
"""Times that differ by no more are called equal."""


@dataclass(frozen=True)
class EntryLetter:
    """One layer's place: query and lengths of the lists there, answer back, and the two flags. Mapped host memory."""

    q: Tensor
    count: Tensor
    out: Tensor
    lse: Tensor
    post: Tensor
    reply: Tensor


def given(count: Tensor) -> float:
    """Entries of the CPU's lists, the mean over those that have any."""
    return float(count.sum()) / max(1, int((count > 0).sum()))


def balanced(stay: int, own: int, other: int, given: float) -> int:
    """How many entries a KV head the GPU fetches next, where it fetched at most `stay` in a time of `own` and the CPU
    attended to `given` in `other`.

    Half of what would make both times equal if they were proportional to entries: they have a part that is not, so it
    is never too much, even where one entry more doubles what the CPU needs.
    """
    if abs(other - own) <= NEARLY * own:
        return stay
    if not given:  # the CPU has nothing: less is fetched until it gets something, if it would be done first
        return stay - stay // 8 - 2 if own > other else stay
    here, there = own / max(1, stay), other / given
    move = abs(other - own) / (here + there) / 2
    if other > own:
        return stay + max(1, round(move))
    return stay - max(int(move), int(other + there < own))  # a single one, where the CPU would still be done first


class EntryBox(Box):
    """Lists of at most `most` entries a KV head.

    Positions of all layers go to the same place: a layer's are read before its answer comes, and the next layer's are
    written after it.
    """

    def __init__(
        self, table: StepTable, shapes: dict[int, LayerShape], most: int, device: torch.device, server: Server
    ) -> None:
        super().__init__(table, len(shapes), device, server)
        first = next(iter(shapes.values()))
        memory = host_memory(self.batch * first.kv_heads * most * 4, device)
        self.index = memory.view(torch.int32).view(self.batch, first.kv_heads, most)
        self.shapes = shapes
        self._stay: dict[int, tuple[Tensor, int]] = {}
        """By layer: on the GPU how many entries a KV head it keeps for itself, and the same as it was last set."""
        self._steps = 0
        self.letters: dict[int, EntryLetter] = {}
        self._answer = tuple(
            torch.zeros(self.batch, first.q_heads, *more, device=device) for more in ((first.head_dim,), ())
        )
        """Of one layer after the other, in GPU memory."""

    def begin(self) -> None:
        super().begin()
        self._steps += 1
        if self._stay and self._steps % EVERY == 0:
            for layer, (own, other) in self.times().items():
                self._balance(layer, own, other)

    def _balance(self, layer: int, own: int, other: int) -> None:
        """own, other: how long the GPU's part took, and the CPU's."""
        if layer not in self._stay:
            return
        tensor, before = self._stay[layer]
        now = max(0, min(balanced(before, own, other, given(self.letters[layer].count)), self.index.shape[-1]))
        if now != before:
            self._stay[layer] = tensor, now
            tensor.fill_(now)

    def add(
        self, layer: int, blocks: Tensor | PackedBlocks, scale: float, stay: tuple[Tensor, int] | None
    ) -> EntryLetter:
        """A layer of the step, in order; the second time it is found as it is.

        stay: `[1]` int32, how many entries a KV head the GPU keeps, and the same number; it grows where the GPU waits
        for the CPU, else it shrinks.
        """
        if self.knows(layer):
            return self.letters[layer]
        shape = self.shapes[layer]
        letter, table = self._letter(shape), self.table.host("host_blocks")
        reason = refuses(letter.q, blocks)
        if reason is not None:
            raise UnsupportedError(
                f"The CPU's kernels cannot take this model: {reason}.", "Use place pull, or another method."
            )
        plan = native.plan_attend_rows(
            letter.q,
            source(blocks),
            table.view(self.batch, 1, -1),
            self.index,
            letter.count,
            scale=scale,
            softcap=shape.softcap or 0.0,
            into=(letter.out, letter.lse),
        )
        self._add(layer, plan, letter.post, letter.reply)
        self.letters[layer] = letter
        if stay is not None:
            self._stay[layer] = stay
        return letter

    def post(self, layer: int, q: Tensor) -> None:
        """q `[rows, q_heads, d]` on its way to the CPU, and the wait for the answer, beside what the GPU does next."""
        from coattn.ops.triton import handover

        letter, q = self.letters[layer], q.contiguous()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            handover.post(q, letter.q, letter.post, self.step, self._stamp(layer, 0))
            handover.wait(letter.reply, self.step, self.failed, self.verdict, self._stamp(layer, 2), DEADLINE_S)
        q.record_stream(self._side)

    def fetch(self, layer: int, rows: int) -> Split:
        """The CPU's part, in GPU memory until the next layer's; the GPU leaves the time when its own was done."""
        from coattn.ops.triton import handover

        handover.mark(self.stamp(layer))
        torch.cuda.current_stream(self.device).wait_stream(self._side)
        letter, (out, lse) = self.letters[layer], self._answer
        handover.receive(letter.out[:rows], letter.lse[:rows], out, lse)
        return Split(out[:rows, None], lse[:rows, None])

    def times(self) -> dict[int, tuple[int, int]]:
        """By layer, nanoseconds from the post to the end of the GPU's own part, and to the answer."""
        found = dict(zip(self._order, self._stamps.tolist(), strict=False))
        return {layer: (ready - posted, answered - posted) for layer, (posted, ready, answered) in found.items()}

    def taken(self) -> dict[int, float]:
        """By layer: entries of the last step's lists, over its sequences; the mean over KV heads."""
        return {layer: float(letter.count.sum()) / letter.count.shape[1] for layer, letter in self.letters.items()}

    def _letter(self, shape: LayerShape) -> EntryLetter:
        batch, heads = self.batch, self.batch * shape.q_heads
        sizes = (heads * shape.head_dim * shape.dtype.itemsize, batch * shape.kv_heads * 4)
        q, count, out, lse, post, reply = self._cut((*sizes, heads * shape.head_dim * 4, heads * 4, LINE, LINE))
        count.zero_()
        return EntryLetter(
            q.view(shape.dtype).view(batch, shape.q_heads, shape.head_dim),
            count.view(torch.int32).view(batch, shape.kv_heads),
            out.view(torch.float32).view(batch, shape.q_heads, shape.head_dim),
            lse.view(torch.float32).view(batch, shape.q_heads),
            post.view(torch.int32)[:1],
            reply.view(torch.int32)[:1],
        )
