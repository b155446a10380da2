"""Workers of the asynchronous queue that stall, fail or die: an error in time, and a new pool afterwards."""

import time
from collections.abc import Iterator

import pytest
import torch

from coattn.errors import WorkerError
from coattn.kernels.native.attend import attend, attend_in_time
from coattn.native.core import NativeError, extension
from coattn.types import BlockList


@pytest.fixture(autouse=True)
def _no_fault_left() -> Iterator[None]:
    yield
    extension.inject_fault("")


def call() -> tuple[torch.Tensor, torch.Tensor, BlockList]:
    blocks = torch.randn(6, 2, 2, 8, 16)
    picked = BlockList(torch.arange(6).int().view(1, 1, 6), torch.tensor([[41]]).int(), 41)
    return torch.randn(1, 1, 4, 16), blocks, picked


def test_the_same_result_on_a_thread_of_its_own() -> None:
    q, blocks, picked = call()
    assert torch.equal(attend_in_time(q, blocks, picked, 0.25, None).out, attend(q, blocks, picked, 0.25, None).out)


@pytest.mark.parametrize("fault", ["stall", "die", "throw"])
def test_a_lost_job_is_an_error_in_time_and_the_next_one_works(fault: str) -> None:
    q, blocks, picked = call()
    want = attend(q, blocks, picked, 0.25, None).out
    extension.inject_fault(fault, 6.0)
    start = time.perf_counter()
    with pytest.raises(WorkerError) as caught:
        attend_in_time(q, blocks, picked, 0.25, None)
    assert time.perf_counter() - start < 4.0, "long before the stall is over, however busy the machine is"
    assert caught.value.hint
    assert torch.equal(attend_in_time(q, blocks, picked, 0.25, None).out, want)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(NativeError, match="no fault 'explode'"):
        extension.inject_fault("explode")
