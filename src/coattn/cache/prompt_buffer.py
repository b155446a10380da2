"""Keys and values of prompts that are read chunk by chunk, unrounded and in one piece, for the chunks that follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coattn.cache import available
from coattn.cache.block_table import BlockGeneration
from coattn.cache.host_memory import CopyStream, host_memory, layer_views
from coattn.cache.ledger import PLACE
from coattn.cache.page_cache import Page, PageCache
from coattn.cache.spec import CacheSpec
from coattn.errors import BudgetError
from coattn.types import LayerShape, Step
from coattn.units import ceil_div

MAX_PAGE_TOKENS = 8192
WHAT = "Keeping a prompt's keys and values while it is read"


@dataclass
class BufferedPrompt:
    """One prompt."""

    known: int
    """Blocks that the index followed before: it gets the others together, when the prompt is over."""
    pages: list[Page] = field(default_factory=list)
    """In order; one that begins before another ends is used up to there."""

    @property
    def room(self) -> int:
        return self.pages[-1].first + self.pages[-1].size if self.pages else 0

    def spans(self) -> list[tuple[Page, int, int]]:
        """Pages, each with its first token and the one after its last."""
        ends = [page.first for page in self.pages[1:]] + [self.room]
        return [
            (page, page.first, min(end, page.first + page.size)) for page, end in zip(self.pages, ends, strict=True)
        ]


class PromptKVBuffer:
    """Prompts of which more is to come. Pages lie in GPU memory where the budget has room for them, else in DRAM.

    Where the cache has every key in DRAM anyway (`spare_room`), pages lie in GPU memory alone: they save each chunk the
    transfer of all that came before over PCIe. A prompt that finds no room there any more loses its pages, and is read
    from DRAM. Pages of prompts that are over stay cached in half of that room until others need it: a turn, or a second
    question, finds there what it would fetch again.

    Owner and writer: the layout, in the steps of the prompt. Reader: the next chunk of the same prompt; of a cached
    one, the next sequence with the same blocks. A page may be overwritten when it has no users. Pages in DRAM are kept
    for the next prompt, since memory that a GPU can read takes long to make.
    """

    def __init__(self, spec: CacheSpec, block: int, spare_room: bool = False, used: bool = True) -> None:
        """used: whether any prompt is kept; one that is not is read from DRAM, chunk after chunk."""
        self.spec, self.block, self.spare_room, self.used = spec, block, spare_room, used
        self.held: dict[int, BufferedPrompt] = {}
        self.token_bytes = sum(shape.token_bytes for shape in spec.layers.values())
        self.pages = PageCache()
        self._spare: list[Page] = []
        self._copies = CopyStream()

    def plan(self, step: Step, blocks_of: Callable[[int, int], list[BlockGeneration]]) -> dict[int, int]:
        """Makes room for the chunks that are not the last of their prompts -> slots that are new here, with history,
        and from which token on their pages lack it.

        blocks_of: `(slot, blocks) ->` a sequence's first blocks.
        Raises BudgetError; what was taken so far stays until the prompt ends. In spare room there is no error.
        """
        fresh: dict[int, int] = {}
        if not self.used or not (step.more or self.pages or self.held):
            return fresh
        for slot, history, length in zip(step.slots, step.history, step.lengths, strict=True):
            more, known = slot in step.more, history // self.block
            if slot not in self.held and self.spare_room and history:
                tokens, pages = self._find_cached(blocks_of(slot, known), history)
                if not pages and not more:
                    continue  # it would be fetched once either way
                self.held[slot], fresh[slot] = BufferedPrompt(known, pages), tokens
            elif slot not in self.held and more:
                self.held[slot] = BufferedPrompt(known)
                if history:
                    fresh[slot] = 0
            if slot in self.held and (more or self.spare_room):
                start = fresh.get(slot, self.held[slot].room)
                if not self._extend(slot, start, length, more) and (more or slot in fresh):
                    fresh.pop(slot, None)
                    self.end(slot)
        return fresh

    def _extend(self, slot: int, start: int, length: int, more: bool) -> bool:
        """Pages of its own for a prompt's tokens from `start` to `length`. False: there is no room."""
        while start < length:
            page = self._page(start, length - start, grows=more)
            if page is None:
                return False
            self.held[slot].pages.append(page)
            start = page.first + page.size
        return True

    def _find_cached(self, blocks: list[BlockGeneration], history: int) -> tuple[int, list[Page]]:
        """Where most of a history is cached: how many tokens of it, and their pages."""
        tokens, held = self.cached(blocks)
        if 2 * tokens < history:
            return 0, []
        for page in held.pages:
            page.users += 1
        return tokens, held.pages

    def write(self, layer: int, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        """k, v `[tokens, kv_heads, d]` of the tokens from `start` on."""
        for page, begin, end in self.held[slot].spans():
            first, last = max(start, begin), min(start + len(k), end)
            if first >= last:
                continue
            for own, new in zip(page.kv[layer], (k, v), strict=True):
                self._copy(page, layer, own[first - begin : last - begin], new[first - start : last - start])

    def read(self, layer: int, slot: int, tokens: int) -> tuple[Tensor, Tensor]:
        """k, v `[tokens, kv_heads, d]` of a prompt's first tokens, on the layer's device."""
        return self.gather(self.held[slot], layer, 0, tokens)

    def keys(self, held: BufferedPrompt, layer: int, end: int) -> Tensor:
        """`[end, kv_heads, d]` of the first tokens, out of pages in GPU memory."""
        parts = [page.kv[layer][0, : min(end, stop) - begin] for page, begin, stop in held.spans() if begin < end]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def gather(self, held: BufferedPrompt, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """k, v `[end - start, kv_heads, d]` out of pages, on the layer's device."""
        shape, pages = self.spec.layers[layer], held.pages
        if all(page.tier == "gpu" for page in pages):
            spans = [(page, max(start, a) - a, min(end, b) - a) for page, a, b in held.spans()]
            parts = [page.kv[layer][:, a:b] for page, a, b in spans if a < b]
            k, v = parts[0] if len(parts) == 1 else torch.cat(parts, 1)  # one kernel, however many pages
            return k, v
        out = torch.empty(2, end - start, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
        for page, begin, stop in held.spans():
            first, last = max(start, begin), min(end, stop)
            if last <= first:
                continue
            if layer in page.arriving:
                torch.cuda.current_stream(shape.device).wait_event(page.arriving[layer])
            for own, kept in zip(out, page.kv[layer], strict=True):
                own[first - start : last - start].copy_(kept[first - begin : last - begin], non_blocking=True)
        return out[0], out[1]

    def cached(self, blocks: list[BlockGeneration]) -> tuple[int, BufferedPrompt]:
        """How many first tokens of a sequence with such blocks are cached, and their pages, until the next plan."""
        count, pages = self.pages.find(blocks)
        return count * self.block, BufferedPrompt(count, [page for page in pages if page.first < count * self.block])

    def hold(self, blocks: list[BlockGeneration]) -> BufferedPrompt | None:
        """The pages of these blocks, where all are cached; they stay until they are given back."""
        tokens, held = self.cached(blocks) if blocks else (0, BufferedPrompt(0))
        if not tokens or tokens < len(blocks) * self.block:
            return None
        for page in held.pages:
            page.users += 1
        return held

    def known(self, slot: int, blocks: int) -> int:
        """Of the first blocks of a sequence, those that the index follows."""
        return min(blocks, self.held[slot].known) if slot in self.held and not self.spare_room else blocks

    def finish(self, slot: int, blocks: Sequence[BlockGeneration]) -> None:
        """The prompt is read. blocks: its first ones; those that lie in its pages are cached."""
        held = self.held.pop(slot, None)
        if held is None:
            return
        count = min(len(blocks), held.room // self.block)
        if not self.spare_room or not count:
            self.give_back(held.pages)
            return
        for gone in self.pages.add(blocks[:count], held.pages):
            self.give_back(gone.pages)
        ledger = self.spec.ledger
        while (room := ledger.room("gpu")) is not None and room < self.pages.bytes:
            self._drop_oldest()

    def end(self, slot: int) -> None:
        """The prompt is gone, or over and not cached."""
        self.give_back(self.held.pop(slot, BufferedPrompt(0)).pages)

    def release(self) -> None:
        for slot in list(self.held):
            self.end(slot)
        while self._drop_oldest():
            pass
        self.spec.ledger.give("host", sum(page.nbytes for page in self._spare))
        self._spare.clear()

    def give_back(self, pages: list[Page]) -> None:
        """Pages have one user less, such as the one that `hold` made."""
        for page in pages:
            page.users -= 1
            if page.users:
                continue
            if page.tier == "gpu":
                self.spec.ledger.give("gpu", page.nbytes)
            else:
                page.users = 1
                self._spare.append(page)

    def _make_room(self, nbytes: int) -> bool:
        """Drops cached prompts, the oldest first, until the GPU tier has so much room. False: it has not."""
        while (room := self.spec.ledger.room("gpu")) is not None and room < nbytes:
            if not self._drop_oldest():
                return False
        return True

    def _drop_oldest(self) -> bool:
        oldest = self.pages.drop_oldest()
        if oldest is not None:
            self.give_back(oldest.pages)
        return oldest is not None

    def _page(self, first: int, wanted: int, grows: bool = True) -> Page | None:
        """As large as what there is already, if the prompt goes on, so that many small chunks do not make many pages;
        None: no spare room."""
        size = min(MAX_PAGE_TOKENS, max(wanted, first) if grows else wanted)
        size = ceil_div(size, self.block) * self.block
        nbytes, ledger = size * self.token_bytes, self.spec.ledger
        if self._make_room(nbytes):
            try:
                layers = self.spec.layers.items()
                kv = {i: torch.empty(_size(size, s), dtype=s.dtype, device=s.device) for i, s in layers}
            except torch.OutOfMemoryError:
                pass
            else:
                ledger.take("gpu", nbytes, WHAT)
                return Page("gpu", first, size, nbytes, kv)
        if self.spare_room:
            return None
        for page in self._spare:
            if page.size >= min(wanted, MAX_PAGE_TOKENS):
                self._spare.remove(page)
                page.first = first
                return page
        try:
            ledger.take("host", nbytes, WHAT)
        except BudgetError:
            if size <= wanted:
                raise
            size = ceil_div(min(MAX_PAGE_TOKENS, wanted), self.block) * self.block
            nbytes = size * self.token_bytes
            ledger.take("host", nbytes, WHAT)
        try:
            if ledger.limit("host") is None:
                available.require(nbytes, WHAT, PLACE["host"])
            memory = host_memory(nbytes, self.spec.device)
        except BaseException:
            ledger.give("host", nbytes)
            raise
        kv = layer_views(memory, {i: (s.dtype, _size(size, s)) for i, s in self.spec.layers.items()})
        return Page("host", first, size, nbytes, kv)

    def _copy(self, page: Page, layer: int, target: Tensor, source: Tensor) -> None:
        if page.tier == "gpu" or source.device.type != "cuda":
            target.copy_(source)
            return
        page.arriving[layer] = self._copies.start(source.contiguous(), lambda x: target.copy_(x, non_blocking=True))


def _size(tokens: int, shape: LayerShape) -> tuple[int, int, int, int]:
    return 2, tokens, shape.kv_heads, shape.head_dim
