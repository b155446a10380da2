"""Keys and values of prompts that are read chunk by chunk, as they are and in one piece, for the chunks that follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.cache import available
from coattn.cache.host_memory import host_memory
from coattn.cache.ledger import PLACE
from coattn.cache.spec import CacheSpec
from coattn.errors import BudgetError
from coattn.types import LayerShape, Step, Tier

PAGE = 8192
"""Tokens of the largest piece of memory that is taken at a time."""
WHAT = "Keeping a prompt's keys and values while it is read"


@dataclass
class Page:
    """Room for tokens `first .. first + size` of one prompt."""

    tier: Tier
    first: int
    size: int
    nbytes: int
    kv: dict[int, Tensor]
    """By layer `[2, size, kv_heads, head_dim]`."""
    arriving: dict[int, Any] = field(default_factory=dict)
    """Layers of a page in DRAM that a GPU is still writing to: the event to wait for."""


@dataclass
class Held:
    """One prompt."""

    known: int
    """Blocks that the index had heard of before: the others it hears of together, when the prompt is over."""
    pages: list[Page] = field(default_factory=list)

    @property
    def room(self) -> int:
        return sum(page.size for page in self.pages)


class Reading:
    """Prompts of which more is to come. Pages lie in GPU memory where the budget has room for them, else in DRAM.

    Where the cache has every key in DRAM anyway (`spare_room`), pages lie in GPU memory alone: they save each chunk the
    way of all that came before over PCIe. A prompt that finds no room there any more loses its pages, and is read from
    DRAM like one that follows stored tokens.

    Owner and writer: the KV cache. Reader: the next chunk of the same prompt. Pages in DRAM are kept for the next
    prompt, since memory that a GPU can read takes long to make.
    """

    def __init__(self, spec: CacheSpec, block: int, spare_room: bool = False) -> None:
        self.spec, self.block, self.spare_room = spec, block, spare_room
        self.held: dict[int, Held] = {}
        self.token_bytes = sum(shape.token_bytes for shape in spec.layers.values())
        self._spare: list[Page] = []
        self._stream: Any = None

    def plan(self, step: Step) -> list[int]:
        """Makes room for the chunks that are not the last of their prompts -> slots that are new here, with history.

        Raises BudgetError; what was taken so far stays until the prompt ends. In spare room there is no error.
        """
        fresh = []
        for slot, history, length in zip(step.slots, step.history, step.lengths, strict=True):
            if slot not in step.more:
                continue
            if slot not in self.held:
                if self.spare_room and history:
                    continue
                self.held[slot] = Held(history // self.block)
                if history:
                    fresh.append(slot)
            held = self.held[slot]
            while held.room < length:
                page = self._page(held.room, length - held.room)
                if page is None:
                    self.end(slot)
                    break
                held.pages.append(page)
        return fresh

    def write(self, layer: int, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        """k, v `[tokens, kv_heads, d]` of the tokens from `start` on."""
        for page in self.held[slot].pages:
            first, last = max(start, page.first), min(start + len(k), page.first + page.size)
            if first >= last:
                continue
            for own, new in zip(page.kv[layer], (k, v), strict=True):
                self._copy(page, layer, own[first - page.first : last - page.first], new[first - start : last - start])

    def read(self, layer: int, slot: int, tokens: int) -> tuple[Tensor, Tensor]:
        """k, v `[tokens, kv_heads, d]` of a prompt's first tokens, on the layer's device."""
        shape, pages = self.spec.layers[layer], self.held[slot].pages
        if len(pages) == 1 and pages[0].tier == "gpu":
            return pages[0].kv[layer][0, :tokens], pages[0].kv[layer][1, :tokens]
        out = torch.empty(2, tokens, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
        for page in pages:
            count = min(page.size, tokens - page.first)
            if count <= 0:
                break
            if layer in page.arriving:
                torch.cuda.current_stream(shape.device).wait_event(page.arriving[layer])
            for own, found in zip(out, page.kv[layer], strict=True):
                own[page.first : page.first + count].copy_(found[:count], non_blocking=True)
        return out[0], out[1]

    def known(self, slot: int, blocks: int) -> int:
        """Of the first blocks of a sequence, those that the index has heard of."""
        return min(blocks, self.held[slot].known) if slot in self.held and not self.spare_room else blocks

    def end(self, slot: int) -> None:
        """The prompt is over, or gone."""
        for page in self.held.pop(slot, Held(0)).pages:
            if page.tier == "gpu":
                self.spec.ledger.give("gpu", page.nbytes)
            else:
                self._spare.append(page)

    def release(self) -> None:
        """Gives every byte back to the ledger."""
        for slot in list(self.held):
            self.end(slot)
        self.spec.ledger.give("host", sum(page.nbytes for page in self._spare))
        self._spare.clear()

    def _page(self, first: int, wanted: int) -> Page | None:
        """As large as what there is already, so that many small chunks do not make many pages; None: no spare room."""
        size = min(PAGE, max(wanted, first))
        size = -(-size // self.block) * self.block
        nbytes, ledger = size * self.token_bytes, self.spec.ledger
        room = ledger.room("gpu")
        if room is None or room >= nbytes:
            try:
                kv = {i: torch.empty(_size(size, s), dtype=s.dtype, device=s.device) for i, s in self._layers()}
            except torch.OutOfMemoryError:
                pass
            else:
                ledger.take("gpu", nbytes, WHAT)
                return Page("gpu", first, size, nbytes, kv)
        if self.spare_room:
            return None
        for page in self._spare:
            if page.size >= min(wanted, PAGE):
                self._spare.remove(page)
                page.first = first
                return page
        try:
            ledger.take("host", nbytes, WHAT)
        except BudgetError:
            if size <= wanted:
                raise
            size = -(-min(PAGE, wanted) // self.block) * self.block
            nbytes = size * self.token_bytes
            ledger.take("host", nbytes, WHAT)
        try:
            if ledger.limit("host") is None:
                available.require(nbytes, WHAT, PLACE["host"])
            memory = host_memory(nbytes, self.spec.device)
        except BaseException:
            ledger.give("host", nbytes)
            raise
        at, kv = 0, {}
        for i, s in self._layers():
            end = at + size * s.token_bytes
            kv[i] = memory[at:end].view(s.dtype).view(_size(size, s))
            at = end
        return Page("host", first, size, nbytes, kv)

    def _layers(self) -> list[tuple[int, LayerShape]]:
        return list(self.spec.layers.items())

    def _copy(self, page: Page, layer: int, target: Tensor, source: Tensor) -> None:
        if page.tier == "gpu" or source.device.type != "cuda":
            target.copy_(source)
            return
        device = source.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        source = source.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        source.record_stream(self._stream)
        page.arriving[layer] = event


def _size(tokens: int, shape: LayerShape) -> tuple[int, int, int, int]:
    return 2, tokens, shape.kv_heads, shape.head_dim
