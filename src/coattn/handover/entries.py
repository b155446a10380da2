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
from coattn.state import Split
from coattn.types import LayerShape


@dataclass(frozen=True)
class EntryLetter:
    """One layer's place: query and lengths of the lists there, answer back, and the two flags. Mapped host memory."""

    q: Tensor
    count: Tensor
    out: Tensor
    lse: Tensor
    post: Tensor
    reply: Tensor


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
        self.letters: dict[int, EntryLetter] = {}

    def add(self, layer: int, blocks: Tensor, scale: float) -> EntryLetter:
        """A layer of the step, in order; the second time it is found as it is."""
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
        """The CPU's part, readable by the kernels that follow; the GPU leaves the time when its own was done."""
        from coattn.ops.triton import handover

        handover.mark(self.stamp(layer))
        torch.cuda.current_stream(self.device).wait_stream(self._side)
        letter = self.letters[layer]
        return Split(letter.out[:rows, None], letter.lse[:rows, None])

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
