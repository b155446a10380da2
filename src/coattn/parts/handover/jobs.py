"""What a captured step asks of the CPU: to attend to blocks, or to add up weighted values."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from coattn import native
from coattn.cache.host_memory import host_memory
from coattn.cache.step_table import StepTable
from coattn.errors import UnsupportedError
from coattn.kernels.cuda.top_p import send
from coattn.kernels.invariant import most_rows
from coattn.kernels.native import attend as attending
from coattn.kernels.native import weighted_sum as summing
from coattn.kernels.quantise.blocks import PackedBlocks
from coattn.kernels.quantise.values import ValueBlocks
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import Result
from coattn.parts.handover.mailbox import Mailbox, MailboxThread
from coattn.state import Split
from coattn.types import BlockList, LayerShape, RowWork


def _check(reason: str | None, what: str) -> None:
    if reason is not None:
        raise UnsupportedError(
            f"The CPU's kernels cannot take {what}: {reason}.", "Use another block size, or another method."
        )


class AttendSlot(NamedTuple):
    """One layer's place: query there, state back, and the two flags. Mapped host memory."""

    q: Tensor
    out: Tensor
    lse: Tensor
    post: Tensor
    reply: Tensor


class AttendMailbox(Mailbox):
    """A query there, a state back: the CPU attends to blocks."""

    def __init__(self, table: StepTable, layers: Mapping[int, LayerShape], thread: MailboxThread) -> None:
        super().__init__(table, layers, thread)
        self.slots: dict[int, AttendSlot] = {}
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}
        """Copies of answers in GPU memory, of jobs that were posted from a side stream."""

    def submit(self, call: AttentionCall, blocks: Tensor | PackedBlocks, listed: BlockList) -> Result:
        """A layer's query on its way to the CPU, and the wait for the answer, beside what the GPU does next. The result
        can be read by the kernels that follow its fetching; the GPU's own part of the layer runs before them."""
        from coattn.kernels.triton import handover

        layer, rows, q = call.layer, len(call.q), call.q[:, 0].contiguous()
        slot = self._slot(call, blocks, listed)
        out, lse = slot.out, slot.lse
        here = torch.cuda.current_stream(self.device)
        side = here if call.on_side else self._side
        if side is not here:
            side.wait_stream(here)
        with torch.cuda.stream(side):
            handover.post(q, slot.q, slot.post, self.step, self._posted_at(layer))
            self._wait(layer, slot.reply)
            if call.on_side:
                # the answer is there long before it is needed: then it had better be in GPU memory
                if layer not in self._copied:
                    self._copied[layer] = torch.zeros_like(out, device=q.device), torch.zeros_like(lse, device=q.device)
                out, lse = self._copied[layer]
                handover.receive(slot.out[:rows], slot.lse[:rows], out, lse)
            answered = side.record_event()
        q.record_stream(side)

        def fetch() -> Split:
            torch.cuda.current_stream(self.device).wait_event(answered)
            return Split(out[:rows, None], lse[:rows, None])

        return fetch

    def _slot(self, call: AttentionCall, blocks: Tensor | PackedBlocks, listed: BlockList) -> AttendSlot:
        """A layer's, made when the step has it for the first time. Lists in GPU memory are the step table's."""
        if call.layer in self.slots:
            return self.slots[call.layer]
        shape = call.shape
        state = (self.batch, shape.q_heads, shape.head_dim)
        slot = AttendSlot(*self._cut((shape.dtype, state), (torch.float32, state), (torch.float32, state[:2])))
        _check(attending.refuses(slot.q, blocks), "this model")
        if listed.memory is None and listed.table.device.type != "cpu":
            table, tokens = self.table.host("host_blocks"), self.table.host("host_lens")
            listed = BlockList(table.view(self.batch, 1, -1), tokens.view(self.batch, 1), table.shape[-1])
        plan = native.plan_attend(
            slot.q,
            attending.source(blocks),
            listed.table,
            listed.tokens,
            scale=call.scale,
            softcap=shape.softcap or 0.0,
            into=(slot.out, slot.lse),
            owners=None if listed.owners is None else self.table.host("seq"),
            apart=most_rows() is not None,
        )
        self._add(call.layer, plan, slot.post, slot.reply)
        self.slots[call.layer] = slot
        return slot


class SumSlot(NamedTuple):
    """One layer's place: how many entries of each list, the sum back, and the two flags. Mapped host memory."""

    counts: Tensor
    out: Tensor
    post: Tensor
    reply: Tensor


class SumMailbox(Mailbox):
    """Positions and weights there, sums back: a list of a KV head may have all entries of a sequence.

    Positions and weights of all layers go to the same place: a layer's are read before its answer comes, and the next
    layer's are written after it.
    """

    def __init__(self, table: StepTable, layers: Mapping[int, LayerShape], thread: MailboxThread) -> None:
        super().__init__(table, layers, thread)
        first, most = next(iter(layers.values())), table.column("host_blocks").shape[-1] * table.block
        lists = self.batch * first.kv_heads * most
        memory = host_memory(4 * (lists + self.batch * first.q_heads * most), self.device)
        self.index = memory[: 4 * lists].view(torch.int32).view(self.batch, first.kv_heads, most)
        self.weights = memory[4 * lists :].view(torch.float32).view(self.batch, first.q_heads, most)
        self.slots: dict[int, SumSlot] = {}

    def submit(self, layer: int, values: ValueBlocks, work: RowWork) -> Result:
        """Lists in GPU memory on their way to the CPU, and the wait for the sum, beside what the GPU does next."""
        from coattn.kernels.triton import handover

        slot = self._slot(layer, values)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            send(work.index, work.weights, work.count, self.index, self.weights, slot.counts)
            handover.flag(slot.post, self.step, self._posted_at(layer))
            self._wait(layer, slot.reply)

        def fetch() -> Split:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
            return Split(slot.out[: len(work.lse), None], work.lse[:, None])

        return fetch

    def taken(self) -> list[float]:
        """By layer: entries of the last step's lists, over its sequences; the mean over KV heads."""
        return [float(slot.counts.sum()) / slot.counts.shape[1] for slot in self.slots.values()]

    def _slot(self, layer: int, values: ValueBlocks) -> SumSlot:
        """A layer's, made when the step has it for the first time."""
        if layer not in self.slots:
            _check(summing.refuses(values), "these values")
            shape, table = self.layers[layer], self.table.host("host_blocks")
            out = (self.batch, shape.q_heads, shape.head_dim)
            slot = SumSlot(*self._cut((torch.int32, (self.batch, shape.kv_heads)), (torch.float32, out)))
            listed = table.view(self.batch, 1, -1)
            plan = native.plan_weighted_sum(
                self.weights, self.index, slot.counts, summing.source(values), listed, into=slot.out
            )
            self._add(layer, plan, slot.post, slot.reply)
            self.slots[layer] = slot
        return self.slots[layer]
