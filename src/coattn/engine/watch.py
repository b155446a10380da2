"""How far requests are, as one line on stderr: what is read of their prompts, then what is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from coattn.engine.engine import Engine
from coattn.engine.handle import Handle
from coattn.engine.request import RequestOutput
from coattn.progress import progress_line, silent

PAUSE = 0.1
"""Seconds between two looks: of many requests they take as long as a step."""


@contextmanager
def watching(engine: Engine, handles: Sequence[Handle], wanted: bool) -> Iterator[Callable[[], None]]:
    """Shows how far `handles` are whenever its result is called, and between the layers of a prompt."""
    with progress_line(wanted=wanted) as show:
        if show is silent:
            yield lambda: None
            return
        requests, of = [handle.request for handle in handles], len(handles)
        whole = sum(len(each.prompt) for each in requests)
        most = sum(each.limit for each in requests) - whole
        looked = first = 0.0

        def look() -> None:
            nonlocal looked, first
            now = time.perf_counter()
            if now - looked < PAUSE:
                return
            looked = now
            read, new = engine.part_read, sum(handle.new_tokens for handle in handles)
            read += sum(len(each.prompt) if each.finished else each.prompt_read for each in requests)
            answers = f", {sum(each.finished for each in requests)} of {of} answers" if of > 1 else ""
            if read < whole:
                show("reading", read, whole, f"{read:,.0f} of {whole:,} tokens{answers}")
                return
            first = first or now
            show("writing", new, most, f"{new:,} tokens, {new / max(now - first, PAUSE):.1f}/s{answers}")

        with engine.flushing(look):
            yield look


def stream(engine: Engine, handle: Handle, wanted: bool) -> Iterator[RequestOutput]:
    """The parts of an answer. The line ends where the answer begins, if both are on the terminal."""
    with ExitStack() as line:
        look = line.enter_context(watching(engine, [handle], wanted))
        look()
        for part in handle.stream():
            if part.text and sys.stdout.isatty():
                line.close()
            yield part
            look()
