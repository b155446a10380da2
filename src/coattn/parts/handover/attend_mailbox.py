"""The mailbox of a step in which the CPU attends: a query there, an attention state back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn import native
from coattn.cache.step_table import StepTable
from coattn.errors import UnsupportedError
from coattn.kernels.native.attend import refuses, source
from coattn.kernels.quantise.blocks import PackedBlocks
from coattn.parts.handover.mailbox import LINE_BYTES, Mailbox
from coattn.parts.handover.thread import DEADLINE_S, MailboxThread
from coattn.state import Split
from coattn.types import BlockList, LayerShape


@dataclass(frozen=True)
class MailboxSlot:
    """One job's place in the mailbox: query there, state back, and the two flags. Mapped host memory."""

    q: Tensor
    out: Tensor
    lse: Tensor
    post: Tensor
    reply: Tensor


@dataclass(frozen=True)
class LayerJob:
    """What the CPU does for one layer: attend over these blocks.

    picked: lists in host memory, read anew at every step; None: those of the step table.
    """

    layer: int
    shape: LayerShape
    blocks: Tensor | PackedBlocks
    scale: float
    picked: BlockList | None = None


class AttendMailbox(Mailbox):
    """A query there, a state back: the CPU attends to blocks."""

    def __init__(
        self, table: StepTable, shapes: dict[int, LayerShape], device: torch.device, thread: MailboxThread
    ) -> None:
        super().__init__(table, len(shapes), device, thread)
        self.slots: dict[int, MailboxSlot] = {}
        self._answered: dict[int, Any] = {}
        """Events after which a job's answer can be read, of the step that is being captured."""
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}
        """Copies of answers in GPU memory, of jobs that were posted from a side stream."""

    def add(self, job: LayerJob) -> None:
        """A layer of the step, in order; the second time nothing happens."""
        if self.knows(job.layer):
            return
        slot, shape = self._slot(job.shape), job.shape
        reason = refuses(slot.q, job.blocks)
        if reason is not None:
            raise UnsupportedError(
                f"The CPU's kernels cannot take this model: {reason}.", "Use another block size, or another method."
            )
        picked = job.picked
        if picked is None:
            table, tokens = self.table.host("host_blocks"), self.table.host("host_lens")
            picked = BlockList(table.view(self.batch, 1, -1), tokens.view(self.batch, 1), table.shape[-1])
        plan = native.plan_attend(
            slot.q,
            source(job.blocks),
            picked.table,
            picked.tokens,
            scale=job.scale,
            softcap=shape.softcap or 0.0,
            into=(slot.out, slot.lse),
            owners=None if picked.owners is None else self.table.host("seq"),
        )
        self._add(job.layer, plan, slot.post, slot.reply)
        self.slots[job.layer] = slot

    def post(self, layer: int, q: Tensor, on_side: bool = False) -> None:
        """q `[rows, q_heads, d]` on its way to the CPU, and the wait for the answer, beside what the GPU does next.

        on_side: the current stream is a side one already.
        """
        from coattn.kernels.triton import handover

        slot = self.slots[layer]
        q = q.contiguous()
        here = torch.cuda.current_stream(self.device)
        side = here if on_side else self._side
        if side is not here:
            side.wait_stream(here)
        with torch.cuda.stream(side):
            handover.post(q, slot.q, slot.post, self.step, self._timestamp(layer, 0))
            handover.wait(slot.reply, self.step, self.failed, self.verdict, self._timestamp(layer, 2), DEADLINE_S)
            if on_side:
                # the answer is there long before it is needed: then it had better be in GPU memory
                here_out, here_lse = self._copies(layer)
                handover.receive(slot.out[: len(q)], slot.lse[: len(q)], here_out, here_lse)
            self._answered[layer] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._answered[layer].record(side)
        q.record_stream(side)

    def fetch(self, layer: int, rows: int) -> Split:
        """The CPU's part, readable by the kernels that follow; the GPU's own part of the layer runs before them."""
        torch.cuda.current_stream(self.device).wait_event(self._answered.pop(layer))
        slot = self.slots[layer]
        out, lse = self._copied.get(layer, (slot.out, slot.lse))
        return Split(out[:rows, None], lse[:rows, None])

    def _copies(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self._copied:
            slot = self.slots[layer]
            out, lse = (torch.zeros_like(part, device=self.device) for part in (slot.out, slot.lse))
            self._copied[layer] = out, lse
        return self._copied[layer]

    def _slot(self, shape: LayerShape) -> MailboxSlot:
        heads = self.batch * shape.q_heads
        sizes = (
            heads * shape.head_dim * shape.dtype.itemsize,
            heads * shape.head_dim * 4,
            heads * 4,
            LINE_BYTES,
            LINE_BYTES,
        )
        q, out, lse, post, reply = self._cut(sizes)
        return MailboxSlot(
            q.view(shape.dtype).view(self.batch, shape.q_heads, shape.head_dim),
            out.view(torch.float32).view(self.batch, shape.q_heads, shape.head_dim),
            lse.view(torch.float32).view(self.batch, shape.q_heads),
            post.view(torch.int32)[:1],
            reply.view(torch.int32)[:1],
        )
