"""The mailbox of a step in which the CPU adds up values: positions and weights there, sums back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn import native
from coattn.cache.host_memory import host_memory
from coattn.cache.step_table import StepTable
from coattn.errors import UnsupportedError
from coattn.kernels.native.weighted_sum import refuses, source
from coattn.kernels.quantise.values import ValueBlocks
from coattn.parts.handover.mailbox import LINE_BYTES, Mailbox
from coattn.parts.handover.thread import DEADLINE_S, MailboxThread
from coattn.state import Split
from coattn.types import LayerShape, RowWork


@dataclass(frozen=True)
class SumSlot:
    """One layer's place: how many entries of each list, the sum back, and the two flags. Mapped host memory."""

    count: Tensor
    out: Tensor
    post: Tensor
    reply: Tensor


class SumMailbox(Mailbox):
    """Positions and weights there, sums back: lists of at most `max_entries` entries a KV head.

    Positions and weights of all layers go to the same place: a layer's are read before its answer comes, and the next
    layer's are written after it.
    """

    def __init__(
        self,
        table: StepTable,
        shapes: dict[int, LayerShape],
        max_entries: int,
        device: torch.device,
        thread: MailboxThread,
    ) -> None:
        super().__init__(table, len(shapes), device, thread)
        first = next(iter(shapes.values()))
        batch, kv_heads, q_heads = self.batch, first.kv_heads, first.q_heads
        memory = host_memory(batch * (kv_heads + q_heads) * max_entries * 4, device)
        lists = batch * kv_heads * max_entries * 4
        self.index = memory[:lists].view(torch.int32).view(batch, kv_heads, max_entries)
        self.weights = memory[lists:].view(torch.float32).view(batch, q_heads, max_entries)
        self.shapes = shapes
        self.slots: dict[int, SumSlot] = {}

    def add(self, layer: int, values: ValueBlocks) -> None:
        """A layer of the step, in order; the second time nothing happens."""
        if self.knows(layer):
            return
        reason = refuses(values)
        if reason is not None:
            raise UnsupportedError(
                f"The CPU's kernels cannot take these values: {reason}.", "Use another block size, or another method."
            )
        slot, table = self._slot(self.shapes[layer]), self.table.host("host_blocks")
        table = table.view(self.batch, 1, -1)
        plan = native.plan_weighted_sum(self.weights, self.index, slot.count, source(values), table, into=slot.out)
        self._add(layer, plan, slot.post, slot.reply)
        self.slots[layer] = slot

    def post(self, layer: int, picked: RowWork) -> None:
        """Lists in GPU memory on their way to the CPU, and the wait for the sum, beside what the GPU does next.

        The caller keeps the lists until `fetch`.
        """
        from coattn.kernels.cuda.top_p import send
        from coattn.kernels.triton import handover

        slot = self.slots[layer]
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            send(picked.index, picked.weights, picked.count, self.index, self.weights, slot.count)
            handover.flag(slot.post, self.step, self._timestamp(layer, 0))
            handover.wait(slot.reply, self.step, self.failed, self.verdict, self._timestamp(layer, 2), DEADLINE_S)

    def fetch(self, layer: int, picked: RowWork) -> Split:
        """The CPU's sums, readable by the kernels that follow."""
        torch.cuda.current_stream(self.device).wait_stream(self._side)
        rows = len(picked.lse)
        return Split(self.slots[layer].out[:rows, None], picked.lse[:, None])

    def taken(self) -> dict[int, float]:
        """By layer: entries of the last step's lists, over its sequences; the mean over KV heads."""
        return {layer: float(slot.count.sum()) / slot.count.shape[1] for layer, slot in self.slots.items()}

    def _slot(self, shape: LayerShape) -> SumSlot:
        batch = self.batch
        sizes = (batch * shape.kv_heads * 4, batch * shape.q_heads * shape.head_dim * 4, LINE_BYTES, LINE_BYTES)
        count, out, post, reply = self._cut(sizes)
        return SumSlot(
            count.view(torch.int32).view(batch, shape.kv_heads),
            out.view(torch.float32).view(batch, shape.q_heads, shape.head_dim),
            post.view(torch.int32)[:1],
            reply.view(torch.int32)[:1],
        )
