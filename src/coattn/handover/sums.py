"""The mailbox of a step in which the CPU adds up values: positions and weights there, sums back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn import native
from coattn.errors import UnsupportedError
from coattn.handover.box import DEADLINE_S, LINE, Box
from coattn.native.entries import plan_weighted_sum
from coattn.ops.native.weighted_sum import entries_of, refuses
from coattn.quantise.values import ValueBlocks
from coattn.state import Split
from coattn.store.frame import Recording
from coattn.store.host_memory import host_memory
from coattn.types import LayerShape, Weighted


@dataclass(frozen=True)
class SumLetter:
    """One layer's place: how many entries of each list, the sum back, and the two flags. Mapped host memory."""

    count: Tensor
    out: Tensor
    post: Tensor
    reply: Tensor


class SumBox(Box):
    """Lists of at most `most` entries a KV head.

    Positions and weights of all layers go to the same place: a layer's are read before its answer comes, and the next
    layer's are written after it.
    """

    def __init__(self, recording: Recording, shapes: dict[int, LayerShape], most: int, device: torch.device) -> None:
        super().__init__(recording, shapes, device)
        first = next(iter(shapes.values()))
        batch, kv_heads, q_heads = self.batch, first.kv_heads, first.q_heads
        memory = host_memory(batch * (kv_heads + q_heads) * most * 4, device)
        lists = batch * kv_heads * most * 4
        self.index = memory[:lists].view(torch.int32).view(batch, kv_heads, most)
        self.weights = memory[lists:].view(torch.float32).view(batch, q_heads, most)
        self.letters = self._cut(shapes)

    def add(self, layer: int, values: ValueBlocks) -> None:
        """A layer of the step, in order; the second time nothing happens."""
        if layer in self._known:
            return
        reason = refuses(values)
        if reason is not None:
            raise UnsupportedError(
                f"The CPU's kernels cannot take these values: {reason}.", "Use another block size, or another method."
            )
        letter, table = self.letters[layer], self.frame.host("far")
        entries = native.Entries(entries_of(values), table.view(self.batch, 1, -1))
        plan = plan_weighted_sum(self.weights, self.index, letter.count, entries, into=letter.out)
        self._server.add(plan.job, letter.post.data_ptr(), letter.reply.data_ptr())
        self._jobs.append(plan)
        self._known.add(layer)

    def post(self, layer: int, picked: Weighted) -> None:
        """Lists in GPU memory on their way to the CPU, and the wait for the sum, beside what the GPU does next.

        The caller keeps the lists until `fetch`.
        """
        from coattn.ops.cuda.top_p import send
        from coattn.ops.triton import handover

        letter, place = self.letters[layer], self.order[layer]
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            send(picked.index, picked.weights, picked.count, self.index, self.weights, letter.count)
            handover.flag(letter.post, self.step, self._stamp(place, 0))
            handover.wait(letter.reply, self.step, self.failed, self.verdict, self._stamp(place, 2), DEADLINE_S)

    def fetch(self, layer: int, picked: Weighted) -> Split:
        """The CPU's sums, readable by the kernels that follow."""
        torch.cuda.current_stream(self.device).wait_stream(self._side)
        rows = len(picked.lse)
        return Split(self.letters[layer].out[:rows, None], picked.lse[:, None])

    def taken(self) -> dict[int, float]:
        """By layer: entries of the last step's lists, over its sequences; the mean over KV heads."""
        return {layer: float(letter.count.sum()) / letter.count.shape[1] for layer, letter in self.letters.items()}

    def _cut(self, shapes: dict[int, LayerShape]) -> dict[int, SumLetter]:
        batch = self.batch
        sizes = [(batch * s.kv_heads * 4, batch * s.q_heads * s.head_dim * 4, LINE, LINE) for s in shapes.values()]
        padded = [-(-size // LINE) * LINE for each in sizes for size in each]
        parts = iter(torch.split(host_memory(sum(padded), self.device), padded))
        letters = {}
        for (layer, shape), each in zip(shapes.items(), sizes, strict=True):
            count, out, post, reply = (next(parts)[:size] for size in each)
            letters[layer] = SumLetter(
                count.view(torch.int32).view(batch, shape.kv_heads),
                out.view(torch.float32).view(batch, shape.q_heads, shape.head_dim),
                post.view(torch.int32)[:1],
                reply.view(torch.int32)[:1],
            )
        return letters
