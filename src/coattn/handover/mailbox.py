"""The mailbox of a recorded step: memory that GPU and CPU share, and the C++ server behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn import native
from coattn.errors import UnsupportedError, WorkerError
from coattn.native.core import extension
from coattn.ops.native.attend import refuses, source
from coattn.state import Split
from coattn.store.frame import Recording
from coattn.store.host_memory import host_memory
from coattn.trace.step import Span
from coattn.types import BlockList, LayerShape

LINE = 64
"""Bytes between two flags: each has a cache line of its own."""
DEADLINE_S = 1.0
"""How long the GPU waits for one layer's answer, and the server for one layer's query."""


Key = tuple[int, int]
"""A job of a step: its layer, and whether it is the layer's first or second."""
PIECE = 4 << 20
"""Bytes of mapped memory that letters are cut from at a time."""


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
    blocks: Tensor
    scale: float
    picked: BlockList | None = None
    turn: int = 0
    """0 for a layer's first job of a step, 1 for its second."""

    @property
    def key(self) -> Key:
        return self.layer, self.turn


class Mailbox:
    """Letters for the layers of one group, for at most `batch` sequences; see `csrc/mailbox.h` for the memory map.

    Life: `post` and `wait` are recorded into the step; around each replay come `begin` and `finish`.
    """

    def __init__(self, recording: Recording, shapes: dict[int, LayerShape], device: torch.device) -> None:
        self.frame, self.shapes, self.device = recording.frame, shapes, device
        self.batch = recording.frame.batch
        self.letters: dict[Key, Letter] = {}
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._stamps = torch.zeros(2 * len(shapes), 3, dtype=torch.int64, device=device)
        """On the GPU's clock, in nanoseconds, in the order of the letters: query posted, the GPU's own part done,
        answer seen. A layer's second job leaves the second column to the first."""
        self.verdict = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Becomes 1 when the GPU gave up a wait; written by the GPU, read by the host once the step is over."""
        self._number = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._count = 0
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._answered: dict[Key, Any] = {}
        """Events after which a job's answer can be read, of the step that is being recorded."""
        self._server: Any = extension.Mailbox(int(2 * DEADLINE_S * 1e6))
        self._jobs: list[Any] = []
        self._room = torch.empty(0, dtype=torch.uint8)
        self._near: dict[Key, tuple[Tensor, Tensor]] = {}
        """Copies of answers in GPU memory, of jobs that were posted from beside."""

    def add(self, job: LayerJob) -> None:
        """A layer of the step, in order; the second time it is only checked."""
        if job.key in self.letters:
            return
        letter, shape = self._cut(job.shape), job.shape
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
        self._server.add(plan.job, letter.post.data_ptr(), letter.reply.data_ptr(), 2 * job.layer + job.turn)
        self._jobs.append(plan)
        self.letters[job.key] = letter

    def post(self, key: Key, q: Tensor, beside: bool = False, needed: Tensor | None = None) -> None:
        """q `[rows, q_heads, d]` on its way to the CPU, and the wait for the answer, beside what the GPU does next.

        beside: the current stream is a side one already. needed: see `handover.wait`.
        """
        from coattn.ops.triton import handover

        letter, place = self.letters[key], list(self.letters).index(key)
        q = q.contiguous()
        here = torch.cuda.current_stream(self.device)
        side = here if beside else self._side
        if side is not here:
            side.wait_stream(here)
        with torch.cuda.stream(side):
            handover.post(q, letter.q, letter.post, self.step, self._stamp(place, 0))
            needed = self.step if needed is None else needed
            stamp = self._stamp(place, 2)
            handover.wait(letter.reply, self.step, needed, self.failed, self.verdict, stamp, DEADLINE_S)
            if beside and key[1] == 0:
                # the answer is there long before it is wanted: then it had better be near
                here_out, here_lse = self._copies(key)
                handover.receive(letter.out[: len(q)], letter.lse[: len(q)], here_out, here_lse)
            self._answered[key] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._answered[key].record(side)
        q.record_stream(side)

    def stamp(self, layer: int) -> Tensor:
        """Where the GPU's own part of a layer leaves the time of its end."""
        return self._stamp(list(self.letters).index((layer, 0)), 1)

    def fetch(self, key: Key, rows: int) -> Split:
        """The CPU's part, readable by the kernels that follow; what the GPU had to do meanwhile is in front."""
        torch.cuda.current_stream(self.device).wait_event(self._answered.pop(key))
        letter = self.letters[key]
        out, lse = self._near.get(key, (letter.out, letter.lse))
        return Split(out[:rows, None], lse[:rows, None])

    def begin(self, rows: int) -> None:
        """Arms the server for the replay that follows on the current stream."""
        self._count += 1
        self._number.fill_(self._count)
        self.step.copy_(self._number, non_blocking=True)
        self._server.begin(self._count, rows)

    def finish(self) -> None:
        """After the replay is over. Raises WorkerError if the CPU's part is missing; the mailbox is then useless."""
        late = bool(self.verdict)
        if late:
            self._server.call_off()
        reason: str = self._server.finish(100_000 if late else int(2 * DEADLINE_S * 1e6))
        if late or reason:
            raise WorkerError(
                f"The CPU's part of a step is missing: {reason or 'it came after the deadline'}.",
                "The requests of that step are lost; later ones are served by new workers.",
            )

    def spans(self) -> list[Span]:
        """What each layer of the last step did when, on the host's monotonic clock."""
        server: list[tuple[int, int]] = self._server.times()
        stamps = dict(zip(self.letters, self._stamps.tolist(), strict=False))
        # the server sees a post about a microsecond after it was made: the closest pair sets one clock by the other
        pairs = zip(server, stamps.values(), strict=True)
        ahead = min((seen - stamp[0] for (seen, _), stamp in pairs), default=0) - 1000
        spans = []
        for (layer, turn), (seen, done) in zip(self.letters, server, strict=True):
            posted, ready, answered = stamps[layer, turn]
            if turn:
                ready = max(stamps[layer, 0][1:])
            spans.append(Span(layer, posted + ahead, ready + ahead, answered + ahead, seen, done))
        return spans

    def close(self) -> None:
        """Stops the server. One that does not come back keeps this memory, and its pool is given up."""
        if not self._server.stop(100_000):
            _abandoned.append(self)
            native.abandon_pool()

    def _copies(self, key: Key) -> tuple[Tensor, Tensor]:
        if key not in self._near:
            letter = self.letters[key]
            out, lse = (torch.zeros_like(part, device=self.device) for part in (letter.out, letter.lse))
            self._near[key] = out, lse
        return self._near[key]

    def _stamp(self, place: int, which: int) -> Tensor:
        return self._stamps[place, which : which + 1]

    def _cut(self, shape: LayerShape) -> Letter:
        heads = self.batch * shape.q_heads
        sizes = (heads * shape.head_dim * shape.dtype.itemsize, heads * shape.head_dim * 4, heads * 4, LINE, LINE)
        whole = [-(-size // LINE) * LINE for size in sizes]
        if len(self._room) < sum(whole):
            self._room = host_memory(max(PIECE, sum(whole)), self.device)
        parts = torch.split(self._room[: sum(whole)], whole)
        self._room = self._room[sum(whole) :]
        q, out, lse, post, reply = (part[:size] for part, size in zip(parts, sizes, strict=True))
        return Letter(
            q.view(shape.dtype).view(self.batch, shape.q_heads, shape.head_dim),
            out.view(torch.float32).view(self.batch, shape.q_heads, shape.head_dim),
            lse.view(torch.float32).view(self.batch, shape.q_heads),
            post.view(torch.int32)[:1],
            reply.view(torch.int32)[:1],
        )


_abandoned: list[Mailbox] = []
"""Mailboxes whose threads may still write to them: never freed."""
