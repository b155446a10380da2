"""Workers that get no processor time are waited for; lost ones are not."""

import threading
import time
from typing import Any

import pytest
import torch

from coattn.errors import WorkerError
from coattn.kernels.native import attend as ours
from coattn.kernels.native import starved as watch
from coattn.native.core import extension
from coattn.types import BlockList

SECOND = 10**9


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        ({"1": (True, 0)}, {"1": (True, 0)}, True),
        ({"1": (False, 0)}, {"1": (False, 0)}, False),  # sleeps: it is lost, or has nothing to do
        ({"1": (True, 0)}, {"1": (True, SECOND // 100)}, False),  # spins
        ({"1": (False, 0)}, {"1": (True, 0)}, False),
        ({}, {"1": (True, 0)}, False),
        ({"1": (True, 0)}, {}, False),
    ],
)
def test_who_is_starved(
    before: dict[str, Any], after: dict[str, Any], want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([before, after])
    monkeypatch.setattr(watch, "_threads", lambda: next(answers))
    assert watch.starved(0.01) is want


def test_threads_of_this_process_are_seen() -> None:
    stop = threading.Event()
    sleeper = threading.Thread(target=stop.wait)
    sleeper.start()
    try:
        time.sleep(0.05)
        found = watch._threads()
        assert found[str(sleeper.native_id)][0] is False
        ready, ran = found[str(threading.get_native_id())]
        assert ready
        assert ran > 0
    finally:
        stop.set()
        sleeper.join()


def call() -> torch.Tensor:
    q, blocks = torch.randn(1, 1, 4, 16), torch.randn(3, 2, 2, 8, 16)
    picked = BlockList(torch.arange(3, dtype=torch.int32)[None, None], torch.tensor([[24]], dtype=torch.int32), 24)
    return ours.attend_in_time(q, blocks, picked, 0.25, None).out


@pytest.mark.parametrize("busy", [True, False])
def test_a_late_answer_counts_where_the_machine_is_busy(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "DEADLINE_S", 0.3)
    monkeypatch.setattr(ours, "starved", lambda _: busy)
    extension.inject_fault("stall", 0.8)
    try:
        if busy:
            assert call().isfinite().all()
        else:
            with pytest.raises(WorkerError, match="did not answer in time") as caught:
                call()
            assert "busy" in caught.value.hint
            time.sleep(0.8)
    finally:
        extension.inject_fault("", 0)
    assert call().isfinite().all()
