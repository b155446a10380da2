"""The mailbox of a recorded step: memory that GPU and CPU share, and the C++ server behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn import native
from coattn.errors import UnsupportedError
from coattn.handover.box import DEADLINE_S, LINE, Box
from coattn.ops.native.attend import refuses, source
from coattn.state import Split
from coattn.store.frame import Recording
from coattn.store.host_memory import host_memory
from coattn.types import BlockList, LayerShape


@dataclass(frozen=True)
class Letter:
    """One layer's place in the mailbox: query there, answer back, and the two flags. Mapped host memory."""

    q: Tensor
    out: Tensor
    lse: Tensor
    post: Tensor
    reply: Tensor


@dataclass(frozen=True)
class LayerJob:
    """What the CPU does for one layer: attend over these blocks.

    picked: lists in host memory, read anew at every step; None: those of the frame.
    """

    layer: int
    shape: LayerShape
    blocks: Tensor
    scale: float
    picked: BlockList | None = None


class Mailbox(Box):
    """Letters with queries: the CPU attends to blocks."""

    def __init__(self, recording: Recording, shapes: dict[int, LayerShape], device: torch.device) -> None:
        super().__init__(recording, shapes, device)
        self.shapes = shapes
        self.letters = self._cut()

    def add(self, job: LayerJob) -> None:
        """A layer of the step, in order; the second time it is only checked."""
        if job.layer in self._known:
            return
        letter, shape = self.letters[job.layer], job.shape
        reason = refuses(letter.q, job.blocks)
        if reason is not None:
            raise UnsupportedError(
                f"The CPU's kernels cannot take this model: {reason}.", "Use another block size, or another method."
            )
        picked = job.picked
        if picked is None:
            table, tokens = self.frame.host("far"), self.frame.host("far_tokens")
            picked = BlockList(table.view(self.batch, 1, -1), tokens.view(self.batch, 1), table.shape[-1])
        plan = native.plan_attend(
            letter.q,
            source(job.blocks),
            picked.table,
            picked.tokens,
            scale=job.scale,
            softcap=shape.softcap or 0.0,
            into=(letter.out, letter.lse),
            owners=None if picked.owners is None else self.frame.host("slots"),
        )
        self._server.add(plan.job, letter.post.data_ptr(), letter.reply.data_ptr())
        self._jobs.append(plan)
        self._known.add(job.layer)

    def post(self, layer: int, q: Tensor) -> None:
        """q `[rows, q_heads, d]` on its way to the CPU, and the wait for the answer, beside what the GPU does next."""
        from coattn.ops.triton import handover

        letter, place = self.letters[layer], self.order[layer]
        q = q.contiguous()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            handover.post(q, letter.q, letter.post, self.step, self._stamp(place, 0))
            handover.wait(letter.reply, self.step, self.failed, self.verdict, self._stamp(place, 2), DEADLINE_S)
        q.record_stream(self._side)

    def fetch(self, layer: int, rows: int) -> Split:
        """The CPU's part, readable by the kernels that follow; what the GPU had to do meanwhile is in front."""
        torch.cuda.current_stream(self.device).wait_stream(self._side)
        letter = self.letters[layer]
        return Split(letter.out[:rows, None], letter.lse[:rows, None])

    def _cut(self) -> dict[int, Letter]:
        areas = {}
        size = 0
        for layer, shape in self.shapes.items():
            heads = self.batch * shape.q_heads
            parts = (heads * shape.head_dim * shape.dtype.itemsize, heads * shape.head_dim * 4, heads * 4, LINE, LINE)
            starts = []
            for part in parts:
                starts.append(size)
                size += -(-part // LINE) * LINE
            areas[layer] = (starts, parts)
        memory = host_memory(size, self.device)
        letters = {}
        for layer, (starts, parts) in areas.items():
            shape = self.shapes[layer]
            q, out, lse, post, reply = (memory[s : s + n] for s, n in zip(starts, parts, strict=True))
            letters[layer] = Letter(
                q.view(shape.dtype).view(self.batch, shape.q_heads, shape.head_dim),
                out.view(torch.float32).view(self.batch, shape.q_heads, shape.head_dim),
                lse.view(torch.float32).view(self.batch, shape.q_heads),
                post.view(torch.int32)[:1],
                reply.view(torch.int32)[:1],
            )
        return letters
