"""The mailbox of a recorded step: memory that GPU and CPU share, and the C++ server behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn import native
from coattn.errors import UnsupportedError
from coattn.handover.box import DEADLINE_S, LINE, Box, Key
from coattn.ops.native.attend import refuses, source
from coattn.quantise.blocks import PackedBlocks
from coattn.state import Split
from coattn.store.frame import Recording
from coattn.types import BlockList, LayerShape


@dataclass(frozen=True)
class Letter:
    """One job's place in the mailbox: query there, answer back, and the two flags. Mapped host memory."""

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
    blocks: Tensor | PackedBlocks
    scale: float
    picked: BlockList | None = None
    turn: int = 0
    """0 for a layer's first job of a step, 1 for its second."""

    @property
    def key(self) -> Key:
        return self.layer, self.turn


class Mailbox(Box):
    """Letters with queries: the CPU attends to blocks."""

    def __init__(self, recording: Recording, shapes: dict[int, LayerShape], device: torch.device) -> None:
        super().__init__(recording, 2 * len(shapes), device)
        self.letters: dict[Key, Letter] = {}
        self._answered: dict[Key, Any] = {}
        """Events after which a job's answer can be read, of the step that is being recorded."""
        self._near: dict[Key, tuple[Tensor, Tensor]] = {}
        """Copies of answers in GPU memory, of jobs that were posted from beside."""

    def add(self, job: LayerJob) -> None:
        """A layer of the step, in order; the second time nothing happens."""
        if self.knows(job.key):
            return
        letter, shape = self._letter(job.shape), job.shape
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
        self._add(job.key, plan, letter.post, letter.reply)
        self.letters[job.key] = letter

    def post(self, key: Key, q: Tensor, beside: bool = False, needed: Tensor | None = None) -> None:
        """q `[rows, q_heads, d]` on its way to the CPU, and the wait for the answer, beside what the GPU does next.

        beside: the current stream is a side one already. needed: see `handover.wait`.
        """
        from coattn.ops.triton import handover

        letter = self.letters[key]
        q = q.contiguous()
        here = torch.cuda.current_stream(self.device)
        side = here if beside else self._side
        if side is not here:
            side.wait_stream(here)
        with torch.cuda.stream(side):
            handover.post(q, letter.q, letter.post, self.step, self._stamp(key, 0))
            needed = self.step if needed is None else needed
            stamp = self._stamp(key, 2)
            handover.wait(letter.reply, self.step, needed, self.failed, self.verdict, stamp, DEADLINE_S)
            if beside and key[1] == 0:
                # the answer is there long before it is wanted: then it had better be near
                here_out, here_lse = self._copies(key)
                handover.receive(letter.out[: len(q)], letter.lse[: len(q)], here_out, here_lse)
            self._answered[key] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._answered[key].record(side)
        q.record_stream(side)

    def fetch(self, key: Key, rows: int) -> Split:
        """The CPU's part, readable by the kernels that follow; what the GPU had to do meanwhile is in front."""
        torch.cuda.current_stream(self.device).wait_event(self._answered.pop(key))
        letter = self.letters[key]
        out, lse = self._near.get(key, (letter.out, letter.lse))
        return Split(out[:rows, None], lse[:rows, None])

    def _copies(self, key: Key) -> tuple[Tensor, Tensor]:
        if key not in self._near:
            letter = self.letters[key]
            out, lse = (torch.zeros_like(part, device=self.device) for part in (letter.out, letter.lse))
            self._near[key] = out, lse
        return self._near[key]

    def _letter(self, shape: LayerShape) -> Letter:
        heads = self.batch * shape.q_heads
        sizes = (heads * shape.head_dim * shape.dtype.itemsize, heads * shape.head_dim * 4, heads * 4, LINE, LINE)
        q, out, lse, post, reply = self._cut(sizes)
        return Letter(
            q.view(shape.dtype).view(self.batch, shape.q_heads, shape.head_dim),
            out.view(torch.float32).view(self.batch, shape.q_heads, shape.head_dim),
            lse.view(torch.float32).view(self.batch, shape.q_heads),
            post.view(torch.int32)[:1],
            reply.view(torch.int32)[:1],
        )
