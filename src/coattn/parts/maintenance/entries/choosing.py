"""After a prompt or turn: all that lies in DRAM is weighed with its last queries, and chosen from afresh."""

import itertools
from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from coattn.cache.block_table import BlockTable
from coattn.cache.blocks import BlockMemory
from coattn.cache.kv import KVCache
from coattn.cache.layout.newest import NewestBlocks
from coattn.kernels.append import read_rows
from coattn.kernels.read_keys import read_keys
from coattn.parts.index.averages import Weights
from coattn.parts.maintenance.entries.lists import EntryLists
from coattn.parts.maintenance.weighing import Reduce, weights_over
from coattn.units import ceil_div

REST = 2.0
"""How long a thread rests after a piece of work, by the time that it took: copies take memory bandwidth, which is what
the steps of others wait for."""


class EntryOwner(Protocol):
    """The maintenance that entries are chosen for, as choices see it; `entries.Entries` says what each is."""

    cache: KVCache
    gpu: NewestBlocks
    table: BlockTable
    host: BlockMemory
    block: int
    averages: Weights
    alpha: float
    peak: bool
    keep: Any
    lists: EntryLists
    numbers: dict[int, int]
    stale: dict[int, int]
    queries: dict[int, dict[int, Tensor]]
    scale: dict[int, float]


class Weighed(NamedTuple):
    """What entries of a window weigh from now on `[n, kv_heads]`, at block and row `[n]`."""

    layer: int
    ids: Tensor
    rows: Tensor
    made: Tensor


class Choice:
    """What becomes of the lists of one sequence, which nobody reads until it is over.

    Made on the thread that runs the steps. `run` does it on another, beside the steps: in pieces that take about a
    millisecond, nearly all of it in C++ without the interpreter, without the worker pool and without PyTorch's threads,
    all of which the steps of others need. `finish` does what is left of it in the step that waits for it, with the pool
    and without a rest. Where the keys are still in spare GPU memory they are read there, else out of DRAM.
    """

    def __init__(self, entries: EntryOwner, slot: int, length: int) -> None:
        """length: of the sequence, with the token that it decodes next."""
        self.entries, self.slot, self.length = entries, slot, length
        self.first = entries.gpu.first(length)
        """Blocks that are chosen from."""
        self.queries = dict(entries.queries.get(slot, {}))
        self.before = entries.stale[slot]
        self._stop = torch.zeros(1, dtype=torch.int32)
        """Set: what is being written ends with its piece."""
        self.held = None if entries.cache.prompts is None else self._hold()
        self.waited_for = False
        """Whether its sequence's step has come: the thread leaves it to that."""
        self.given_up = False
        self._window: list[Weighed] = []
        self._inference = torch.is_inference_mode_enabled()
        """Threads begin without it, and may then not write to what was made in it."""
        self._pieces = self._work()
        """What is left to do. Whoever has ended with a piece may leave the next to another thread."""

    def _hold(self) -> Any:
        prompts, dram = self.entries.cache.prompts, self.entries.cache.dram
        assert prompts is not None
        return prompts.hold(dram.generations(self.slot, self.first)) if prompts.spare_room else None

    @property
    def ids(self) -> Tensor:
        """`[blocks]` int32: where what is chosen from lies now. It may move while nobody reads."""
        return self.entries.table.rows[self.slot, : self.first]

    def give_up(self) -> None:
        """Nobody wants it any more; it ends after the piece that it is at."""
        self.given_up = True
        self._stop[0] = 1

    def hurry(self) -> None:
        """A step waits for it: the thread ends after the piece that it is at, and `finish` goes on from there."""
        self.waited_for = True
        self._stop[0] = 1

    def weigh(self) -> None:
        """The window's entries weigh what was found. Between steps: those of others write to the same memory."""
        for layer, ids, rows, made in self._window:
            self.entries.averages[layer][ids, :, rows] = made
            for x in (ids, rows, made) if made.is_cuda else ():  # made on the thread's stream, which goes on
                x.record_stream(torch.cuda.current_stream(x.device))

    def close(self) -> None:
        self._pieces.close()
        if self.held is not None:
            self.entries.cache.prompts.give_back(self.held.pages)  # type: ignore[union-attr]
            self.held = None

    def run(self) -> None:
        """Weighs and copies beside the steps of others, until it is over or somebody wants it otherwise."""
        with torch.inference_mode(self._inference):
            for _ in self._pieces:
                if self.given_up or self.waited_for:
                    return

    def finish(self) -> None:
        """What is left, in the step that waits for it: lists hold what is kept."""
        self.waited_for = True
        self._stop[0] = 0
        left = sum(1 for _ in self._pieces)
        if left:
            self.entries.lists.make_room()

    def _work(self) -> Generator[None]:
        """Piece by piece; between two it may change hands."""
        entries = self.entries
        entries.lists.cut([self.slot])
        yield
        for layer in entries.cache.spec.layers if self.first else ():
            weights = weigh_host(self, layer)
            known = layer in self.queries
            kept = entries.keep(weights, self.first * entries.block) if known else torch.ones_like(weights).bool()
            counts = kept.sum(-1).tolist()  # waits for the keys
            position, weight = kept.nonzero()[:, 1].int().cpu(), weights[kept].cpu()
            yield
            if self.waited_for:
                entries.lists.reserve(sum(ceil_div(count, entries.lists.block) for count in counts))
            ends = [0, *itertools.accumulate(counts)]
            for head, (begin, end) in enumerate(itertools.pairwise(ends)):
                yield from self._fill(layer, head, position[begin:end], weight[begin:end])
        for layer in entries.cache.spec.layers:
            where = (layer, self.slot, self.before, self.length - 1)
            self._window.append(weigh_window(entries, *where, self.queries.get(layer), entries.scale.get(layer, 1.0)))
            yield

    def _fill(self, layer: int, head: int, position: Tensor, weight: Tensor) -> Generator[None]:
        lists, memory = self.entries.lists, self.entries.host[layer]
        block, one = (memory.stride(i) * memory.element_size() for i in (0, 1))
        where, source = (self.entries.numbers[layer], self.slot, head), memory.data_ptr() + head * one
        at = 0
        while at < len(position):
            pace = (0.0, self._stop, False) if self.waited_for else (REST, self._stop, True)
            at += lists.fill(*where, position[at:], weight[at:], self.ids, source, block, *pace)
            yield


def weigh_host(choice: Choice, layer: int) -> Tensor:
    """`[kv_heads, entries]` on the layer's device: the weights of the queries over the blocks that are chosen from; of
    nobody, zero. Reads keys, on the current stream of the device."""
    entries, q = choice.entries, choice.queries.get(layer)
    shape = entries.cache.spec.layers[layer]
    if q is None:
        return torch.zeros(shape.kv_heads, choice.first * entries.block)
    if choice.held is not None and entries.cache.prompts is not None:
        keys = entries.cache.prompts.keys(choice.held, layer, choice.first * entries.block).transpose(0, 1)
    else:
        keys = read_keys(entries.host[layer], choice.ids, shape, entries.block)

    def reduce(weights: Tensor) -> Tensor:
        return weights.amax((0, 1)) if entries.peak else weights.mean(1).amax(0)

    return weights_over(q, keys, entries.scale[layer], shape, reduce)


def weigh_window(
    entries: EntryOwner, layer: int, slot: int, before: int, length: int, q: Tensor | None, scale: float
) -> Weighed:
    """The queries of the last tokens weigh the window's entries, as decode steps would have. Changes nothing.

    Of the first `before` tokens the moving averages go on; those of newer ones, and of entries whose averages nobody
    knows, start with the mean of the weights. Without queries nothing is known of those: they start with zero.
    """
    shape, gpu = entries.cache.spec.layers[layer], entries.gpu
    first = gpu.first(length) * entries.block
    position = torch.arange(first, length)
    ids, rows = (x.to(shape.device) for x in gpu.places(slot, position))
    values = entries.averages[layer]
    if q is None:
        return Weighed(layer, ids, rows, values[ids, :, rows].clamp_min(0.0))
    q = q[-(length - first) :]  # a query before the window would see nothing of it
    keys, _ = read_rows(gpu.memory[layer], ids, rows)
    asking = torch.arange(length - len(q), length)[:, None]
    hidden = (position > asking).to(shape.device)

    def weigh(reduce: Reduce) -> Tensor:
        return weights_over(q, keys.transpose(0, 1), scale, shape, reduce, hidden).T

    made = weigh(lambda weights: weights.mean(1).amax(0))
    if before > first:
        alpha = entries.alpha
        share = alpha * (1 - alpha) ** torch.arange(len(q) - 1, -1, -1, device=shape.device, dtype=torch.float32)
        added = weigh(lambda weights: share @ weights.amax(0))
        old, known = (position < before).to(shape.device)[:, None], values[ids, :, rows]
        went_on = (1 - alpha) ** len(q) * known + added
        made = torch.where(old & (known >= 0), went_on, made)
    return Weighed(layer, ids, rows, made)
