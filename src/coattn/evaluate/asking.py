"""Many prompts through one engine: answers as they finish, and how much has been read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from coattn.engine.llm import LLM
from coattn.engine.params import SamplingParams

Progress = Callable[[int], None]
"""Gets the tokens read so far, of prompts."""


@dataclass(frozen=True)
class Ask:
    """A prompt as token ids, and how it is continued."""

    name: str
    ids: list[int]
    params: SamplingParams


def answers(llm: LLM, asks: Sequence[Ask], progress: Progress | None = None) -> Iterator[tuple[Ask, str]]:
    """`(ask, answer)` in the order in which they finish. Leaving the loop early cancels the rest.

    A request that fails raises its error: a benchmark with holes would look like a worse method.
    """
    handles = [(ask, llm.submit(ask.ids, ask.params)) for ask in asks]
    before = int(llm.report()["prefill_tokens"])
    try:
        while handles:
            llm.step()
            if progress is not None:
                progress(int(llm.report()["prefill_tokens"]) - before)
            done = [pair for pair in handles if pair[1].done]
            handles = [pair for pair in handles if not pair[1].done]
            for ask, handle in done:
                output = handle.output()
                if output.error is not None:
                    raise output.error
                yield ask, output.text
    finally:
        for _, handle in handles:
            handle.cancel()
