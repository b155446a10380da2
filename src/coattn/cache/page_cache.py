"""Pages of prompts that are over, in spare GPU memory, for sequences that go on from the same blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from coattn.cache.block_table import BlockGeneration
from coattn.types import Tier

MAX_CACHED_PROMPTS = 16


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
    users: int = 1
    """Prompts that have it, being read or cached."""


@dataclass(eq=False)
class CachedPrompt:
    """The pages of the first blocks of a text."""

    blocks: list[BlockGeneration]
    pages: list[Page]


class PageCache:
    """The most recently used last.

    Owner: the PromptKVBuffer, which counts the users of the pages of every entry that it adds or that this drops.
    """

    def __init__(self) -> None:
        self._prompts: list[CachedPrompt] = []

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def bytes(self) -> int:
        return sum({id(page): page.nbytes for prompt in self._prompts for page in prompt.pages}.values())

    def find(self, blocks: Sequence[BlockGeneration]) -> tuple[int, list[Page]]:
        """Of these blocks: how many of the first are cached at most, and their pages."""
        longest, best, blocks = 0, None, list(blocks)
        for prompt in self._prompts:
            common = _common(prompt.blocks, blocks)
            if common > longest:
                longest, best = common, prompt
        if best is None:
            return 0, []
        self._prompts.remove(best)
        self._prompts.append(best)
        return longest, best.pages

    def add(self, blocks: Sequence[BlockGeneration], pages: Sequence[Page]) -> list[CachedPrompt]:
        """A text to cache -> those that are dropped for it: what it goes on from, and the oldest."""
        gone = [prompt for prompt in self._prompts if prompt.blocks == list(blocks[: len(prompt.blocks)])]
        self._prompts = [prompt for prompt in self._prompts if prompt not in gone]
        self._prompts.append(CachedPrompt(list(blocks), list(pages)))
        gone += self._prompts[:-MAX_CACHED_PROMPTS]
        del self._prompts[:-MAX_CACHED_PROMPTS]
        return gone

    def drop_oldest(self) -> CachedPrompt | None:
        """The least recently used is cached no more."""
        return self._prompts.pop(0) if self._prompts else None


def _common(one: Sequence[BlockGeneration], other: Sequence[BlockGeneration]) -> int:
    """How many of the first blocks are the same; thousands, most often, or none."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
