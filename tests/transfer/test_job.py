"""One prompt on its way: what a GPU's copies run on."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coattn.transfer.job import Job
from coattn.transfer.lease import Lease


def test_copies_of_one_prompt_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def stream(device: Any) -> Any:
        made.append(SimpleNamespace(device=device, wait_event=lambda _: None))
        return made[-1]

    used: list[Any] = []

    def within(chosen: Any) -> Any:
        used.append(chosen)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    nothing: Any = None
    job = Job(nothing, nothing, nothing, nothing, Lease(5.0))
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:0"):
        with job._on_side_stream(SimpleNamespace(device=device)):
            pass
    assert [each.device for each in made] == ["cuda:0", "cuda:1"]
    assert [each.device for each in used] == ["cuda:0", "cuda:1", "cuda:0", "cuda:0"]
