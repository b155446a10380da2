"""In a recorded step: a second job for the CPU, of the heads whose query was predicted badly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coattn.ops.look_again import Doubts, look_again
from coattn.place.base import Call, Place, State
from coattn.state import Other, Split
from coattn.store.frame import Recording
from coattn.store.host_memory import host_memory
from coattn.types import BlockList, Selection


@dataclass
class SecondLook:
    """Compares queries, asks the CPU again, and puts its answer in place of the first: all on the GPU, layer by layer.

    The job is posted in every step, since a recorded step cannot choose; where it has nothing to do the GPU does not
    wait for the answer.
    """

    doubts: dict[int, Doubts] = field(default_factory=dict)
    _stream: Any = None

    def start(
        self, call: Call, place: Place, far: BlockList, predicted: Tensor, made: Any, bound: float
    ) -> Callable[[State], State]:
        """far: what the real query misses. made: the event after which `predicted` is there.

        Returns what replaces heads of the first answer, once the near part is on its way.
        """
        recording = call.store.recording
        assert recording is not None
        doubts = self._doubts(call, far, recording, place.number(call.q.device))
        with self._beside(call.q, predicted, made):
            present = recording.frame.there("near_tokens", recording.rows)
            look_again(predicted[:, 0], call.q[:, 0], bound, present, far, doubts)
            # the CPU's side of a step that is replayed knows its number of sequences by itself
            some = slice(None) if call.q.device.type == "cuda" else slice(recording.rows)
            listed = BlockList(doubts.table[some], doubts.tokens[some], far.longest, far.memory)
            ask = replace(call, turn=1, beside=True, needed=doubts.needed)
            fetch = place.start(ask, Selection(None, listed))

        def instead(first: State) -> State:
            second = fetch()
            return Split(first.out, first.lse, Other(second.out, second.lse, doubts.below[: recording.rows]))

        return instead

    @contextmanager
    def _beside(self, q: Tensor, predicted: Tensor, made: Any) -> Iterator[None]:
        """On a GPU: a stream beside that of the layers, once both queries are there."""
        if q.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(q.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(q.device))
        self._stream.wait_event(made)
        with torch.cuda.stream(self._stream):
            yield
        q.record_stream(self._stream)
        predicted.record_stream(self._stream)

    def counts(self) -> tuple[int, int]:
        """Heads compared and attended again in all recorded steps. Waits for the GPU."""
        found = [doubts.counts.tolist() for doubts in self.doubts.values()]
        return sum(n for n, _ in found), sum(n for _, n in found)

    def _doubts(self, call: Call, far: BlockList, recording: Recording, step: Tensor) -> Doubts:
        if call.layer in self.doubts:
            # a new mailbox counts its own steps
            self.doubts[call.layer] = replace(self.doubts[call.layer], step=step)
            return self.doubts[call.layer]
        device, batch, heads, width = call.q.device, recording.frame.batch, call.shape.kv_heads, far.table.shape[-1]
        memory = host_memory(4 * batch * heads * (width + 1), device).view(torch.int32)
        table, tokens = torch.split(memory, [batch * heads * width, batch * heads])
        self.doubts[call.layer] = Doubts(
            table.view(batch, heads, width),
            tokens.view(batch, heads),
            torch.zeros(batch, heads, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            step,
            torch.zeros(2, dtype=torch.int64, device=device),
        )
        return self.doubts[call.layer]
