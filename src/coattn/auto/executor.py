"""The GPU, over a window, a pool and single tokens in DRAM: choosing and attending are one sequence of kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from coattn.auto.index import Sketch
from coattn.auto.select import NearWork, ScoredWork
from coattn.kernels.attend import attend
from coattn.kernels.attend_pool import attend_near
from coattn.kernels.attend_scored import attend_scored
from coattn.kernels.quantise.sketch import Scores
from coattn.kernels.rest import Rest
from coattn.kernels.scored_entries import Lanes, ScoredEntries
from coattn.kernels.sink_logits import with_sink_piece
from coattn.kernels.sketch import bound_scores
from coattn.kernels.streams import FIRST, SideStream
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.parts.executor.pull import Pull
from coattn.state import Split
from coattn.types import Step

MIN_SEQS_POOL_FIRST = 4
"""Sequences from which attention over pools is launched before the scan of sketches, whose end it then fills. Shorter
scans would share the GPU with it from the start, and are waited for."""


class _Near(NamedTuple):
    """What attention near by leaves for the choice that follows it. near: lse `[rows, pieces, q_heads]`, sinks too."""

    layer: int
    scores: Scores
    near: Tensor
    rest: Rest


@dataclass
class FetchScored(Pull):
    """Attends near by while a scan of sketches scores all tokens; fetches those that reach their bound over PCIe and
    attends to them, and looks up what lies cold in the pool. Reads prompts as `pull` does.

    Kernels of a layer, in the order of their launches; each stream waits for what was launched before on the step's.
    Pools in 8 bits:

    | stream | kernels |
    |---|---|
    | scan | attention over the window |
    | step | what sketch planes are worth to the query |
    | step, pools | scores of all tokens; beside them attention over the pool's hot rows (with many sequences this is \
launched first) |
    | step | waits for scan; the bound; the choice |
    | fetch, books | fetching and attending; what stands in for the others, and the pool's books |
    | step | looking up cold tokens; waits for fetch, books and pools |

    Pools in the model's own numbers are attended with the window, on the step's stream, beside the scores on `scan`;
    then the bound is known as it is.
    """

    name = "fetch"
    runs = Pull.runs | {"near", "scored"}
    needs = frozenset({"sketch"})
    overlaps = True

    _scan: SideStream = field(init=False, repr=False, default_factory=SideStream)
    _pools: SideStream = field(init=False, repr=False, default_factory=SideStream)
    _lanes: Lanes = field(init=False, repr=False, default_factory=lambda: (SideStream(FIRST), SideStream(FIRST)))
    """Of `fetch` and `books`."""
    _near: _Near | None = field(init=False, repr=False, default=None)
    """From a layer's NearWork to its ScoredWork."""
    _taken: dict[int, tuple[Tensor, Tensor, Tensor]] = field(init=False, repr=False, default_factory=dict)
    """By layer, of the last step: how many `far`, `later` and `cold`, see `Taken`."""

    def run(self, call: AttentionCall, work: Any) -> State:
        if isinstance(work, NearWork):
            sketch = cast("Sketch", call.index)
            beside = self._attend_hot_beside if sketch.pools[call.layer].packed is not None else self._attend_all
            state, self._near = beside(call, sketch, work)
            return state
        if isinstance(work, ScoredWork):
            return self._attend_scored(call, work)
        return super().run(call, work)

    def _attend_all(self, call: AttentionCall, sketch: Sketch, work: NearWork) -> tuple[State, _Near]:
        """Pools are among the blocks: once these are attended, the bound is known as it is."""
        assert call.table is not None
        score = sketch.scores(call.layer, call.q[:, 0], call.table, call.scale)
        # scoring takes arithmetic, attending bandwidth
        scores = self._scan.run(call.q.device, score)
        state = attend(call.q, self.cache.gpu.memory[call.layer], work.blocks, call.scale, call.shape.softcap)
        self._scan.join()
        lse = with_sink_piece(state.lse, call.shape.sink_logits)
        return state, _Near(call.layer, scores, lse, sketch.rest(call.layer))

    def _attend_hot_beside(self, call: AttentionCall, sketch: Sketch, work: NearWork) -> tuple[State, _Near]:
        """What pools weigh is estimated: they are attended beside what follows, which waits for little but PCIe."""
        assert call.table is not None
        table, device, pool = call.table, call.q.device, sketch.pools[call.layer]

        def begin() -> tuple[Tensor, Callable[[], Split]]:
            memory = self.cache.gpu.memory[call.layer]
            return attend_near(call.q, memory, work.blocks, pool, table.seq, call.scale, call.shape.softcap)

        window, rest = self._scan.run(device, begin)
        score = sketch.scores(call.layer, call.q[:, 0], table, call.scale)
        if len(call.q) >= MIN_SEQS_POOL_FIRST:
            state = self._pools.run(device, rest)
            scores = score()
        else:
            scores = score()
            state = self._pools.run(device, rest)
        self._scan.join()
        lse = with_sink_piece(window, call.shape.sink_logits)
        return state, _Near(call.layer, scores, lse, sketch.rest(call.layer))

    def _attend_scored(self, call: AttentionCall, work: ScoredWork) -> State:
        near, self._near = self._near, None
        assert near is not None, "NearWork comes first"
        assert near.layer == call.layer, "NearWork comes first"
        pool, memory = work.pool, self.cache.dram.memory.listed(call.layer)
        bound = bound_scores(near.scores, near.near, work.floors, pool, work.seq, whole=pool.packed is None)
        entries = ScoredEntries(
            work.table, work.tokens, near.scores.scores, bound, near.rest, work.seq, work.sync_fetch, work.fetch
        )
        taken = attend_scored(call.q, memory, entries, pool, call.scale, call.shape.softcap, self._lanes)
        self._taken[call.layer] = taken.far, taken.later, taken.cold
        self._pools.join()
        return taken.states

    def report(self, step: Step) -> dict[str, Any]:
        """Single entries that the last step attended to in DRAM, over its sequences: the mean over layers and KV heads;
        those that come for later steps, and that it looked up in pools."""
        if not self._taken:
            return {}
        counts = [
            torch.stack([x[: step.seqs].sum() for x in own]).cpu() / own[0].shape[1] for own in self._taken.values()
        ]
        attended, later, cold = (torch.stack(counts).sum(0) / len(counts)).tolist()
        more = {"later_entries": later, "cold_entries": cold}
        return {"row_entries": attended, **{name: value for name, value in more.items() if value}}

    def release(self) -> None:
        super().release()
        self._taken.clear()
        self._near = None
