"""Whose prompt is read next, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence

from coattn.engine.chunk_policy import ChunkPolicy
from coattn.engine.request import PromptChunk, Request
from coattn.engine.store.states import SHORT


class PrefillQueue:
    """Divides what may be read between two decode steps among those whose prompts are read, the oldest first."""

    def __init__(self, policy: ChunkPolicy, block: int = 0) -> None:
        """block: chunks end at a multiple of it where they can, and the last one begins there, so that states are known
        where blocks end; 0: there are no states.
        """
        self._policy, self._block = policy, block
        self._oldest_read = False
        """Whether the oldest prompt was the last to be read from."""

    def next(self, readers: Sequence[Request]) -> Request:
        """The oldest, and every other time the one with the least left to read: a short prompt waits for one chunk of a
        long one, and a long one takes at most twice its time."""
        return min(readers, key=_left) if self._oldest_read else readers[0]

    def note(self, chunk: PromptChunk, readers: Sequence[Request]) -> None:
        """This chunk, of one of them, is read."""
        self._oldest_read = chunk.request is readers[0]

    def chunk(self, request: Request, most: int) -> PromptChunk:
        """The next tokens of a prompt. Unless they are its last, they end at a multiple of a tile, if there is one."""
        end, tile = min(request.stored + most, request.total), self._tile
        if end < request.total and end // tile * tile > request.stored:
            end = end // tile * tile
        if request.total - end == 1 and end - request.stored > 1:
            end -= 1  # alone, the last token of a prompt would be a decode step of its own
        if self._block:
            last = (request.total - 2) // self._block * self._block
            whole = min(last, end // self._block * self._block)
            far = end < request.total or whole - request.stored > SHORT
            end = whole if whole > request.stored and far else end
        return PromptChunk(request, end)

    def share(self, readers: Sequence[Request], budget: int) -> tuple[PromptChunk, ...]:
        """Half of the budget is the oldest's; the rest goes to those who have the least left, then back to it.

        A fixed chunk is never cut further: where a prompt is cut must not depend on other requests.
        """
        fixed = self._policy.fixed is not None
        first = self.next(readers) if fixed else readers[0]
        chunks = [self.chunk(first, budget if fixed or len(readers) == 1 else -(-budget // 2))]
        for request in sorted(readers, key=_left):
            left = budget - sum(chunk.size for chunk in chunks)
            if left < 1 or request is first:
                continue
            chunk = self.chunk(request, budget if fixed else left)
            odd = budget >= 2 * self._tile and not chunk.last and chunk.end % self._tile > 0
            if chunk.size <= left and not odd:
                chunks.append(chunk)
        if not fixed:
            chunks[0] = self.chunk(first, budget - sum(chunk.size for chunk in chunks[1:]))
        return tuple(chunks)

    @property
    def _tile(self) -> int:
        return self._policy.tile if self._policy.fixed is None else 1


def _left(request: Request) -> int:
    return request.total - request.stored
