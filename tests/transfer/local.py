"""A process that reads prompts, in this process: a test can reach into it."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.engine.small import small, tokenizer

from coattn.hf.load import Loaded
from coattn.transfer.link import Link
from coattn.transfer.prefill import PrefillServer


@contextmanager
def local(address: str = "tcp://127.0.0.1:0", **options: Any) -> Iterator[PrefillServer]:
    """It takes calls until the end, and has no thread left afterwards."""
    loaded = Loaded(small(), tokenizer(), "small", None)
    with PrefillServer(loaded, address, **{"chunk": 16, **options}) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(10)
            assert not thread.is_alive()


def watch_taken(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """What callers take memory for from now on, as long as anybody has it."""
    taken: list[weakref.ref[torch.Tensor]] = []
    ask = Link._ask

    def watched(*given: Any) -> torch.Tensor:
        memory = ask(*given)
        taken.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(Link, "_ask", watched)
    return taken
