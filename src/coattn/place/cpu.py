"""The CPU, over what lies in DRAM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coattn.ops import flash
from coattn.ops.attend import attend
from coattn.ops.native import attend as native
from coattn.place.base import Call, Place, Result, State
from coattn.place.threads import Threads
from coattn.quantise.blocks import PackedBlocks
from coattn.state import AttnState
from coattn.store.step_table import StepTable
from coattn.trace.step import Span
from coattn.types import BlockList, Selection

if TYPE_CHECKING:
    from coattn.handover.mailbox import Mailbox


@dataclass
class Cpu(Place):
    """Attends where the KV lies: the query goes to the host, an AttnState comes back."""

    name = "cpu"
    covers = "far"
    needs = frozenset({"far"})
    provides = frozenset({"host_place"})
    asynchronous = True

    mailbox: Mailbox | None = field(init=False, repr=False, default=None)
    threads: Threads = field(init=False, repr=False, default_factory=Threads)

    def run(self, call: Call, picked: Selection) -> State:
        if picked.far is None:
            return AttnState.empty(call.q)
        q, blocks, far = call.q.cpu(), _blocks(call, picked.far), picked.far.in_reach(len(call.q))
        far = replace(far, longest=min(far.longest, int(far.tokens.max())))
        if isinstance(blocks, PackedBlocks) and (q.shape[1] >= flash.MANY or native.refuses(q, blocks) is not None):
            blocks, far = unpacked(blocks, far, call.shape.dtype)
        many = isinstance(blocks, Tensor) and flash.refuses(q, blocks, far, call.shape.softcap) is None
        if not many and native.refuses(q, blocks) is None:
            state: State = native.attend_in_time(q, blocks, far, call.scale, call.shape.softcap)
        else:
            assert isinstance(blocks, Tensor)
            state = attend(q, blocks, far, call.scale, call.shape.softcap)
        return AttnState(state.out.to(call.q.device), state.lse.to(call.q.device))

    def start(self, call: Call, picked: Selection) -> Result:
        if call.mailbox:
            return self._post(call, picked)
        if call.q.device.type == "cpu" or picked.far is None:
            return super().start(call, picked)
        return self.threads.start(call, lambda: self.run(call, picked))

    def arm(self, rows: int) -> None:
        if self.mailbox is not None:
            self.mailbox.begin(rows)

    def settle(self) -> None:
        if self.mailbox is not None:
            self.mailbox.finish()

    def spans(self) -> list[Span]:
        return [] if self.mailbox is None else self.mailbox.spans()

    def drop_captures(self) -> None:
        if self.mailbox is not None:
            self.mailbox.close()
            self.mailbox = None

    def release(self) -> None:
        self.drop_captures()
        self.threads.close()

    def prepare(self, table: StepTable) -> None:
        layers = self.opening.layers
        device = next(iter(layers.values())).device
        if self.mailbox is None and device.type == "cuda":
            from coattn.handover.mailbox import Mailbox

            self.mailbox = Mailbox(table, dict(layers), device)

    def _post(self, call: Call, picked: Selection) -> Result:
        if picked.far is None:
            return lambda: AttnState.empty(call.q)
        from coattn.handover.mailbox import LayerJob

        mailbox, table = self.mailbox, call.store.step_table
        assert mailbox is not None, "prepare() comes first"
        own = picked.far if picked.far.memory is not None or picked.far.table.device.type == "cpu" else None
        mailbox.add(LayerJob(call.layer, call.shape, _blocks(call, picked.far), call.scale, own))
        mailbox.post(call.layer, call.q[:, 0], call.beside)
        table.stamps[call.layer] = mailbox.stamp(call.layer)
        return lambda: mailbox.fetch(call.layer, table.rows)


def _blocks(call: Call, far: BlockList) -> Tensor | PackedBlocks:
    return call.store.far.listed(call.layer) if far.memory is None else far.memory


def unpacked(blocks: PackedBlocks, far: BlockList, dtype: torch.dtype) -> tuple[Tensor, BlockList]:
    """The listed blocks alone, in a model's numbers, and the same list over them."""
    ids, places = torch.unique(far.table, return_inverse=True)
    return blocks.read(ids.long(), dtype), replace(far, table=places.to(torch.int32))
