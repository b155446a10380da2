"""Commands and examples that name the embedded model share its weights within a test module."""

from collections.abc import Iterator
from functools import cache
from unittest import mock

import pytest
import torch


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """`load` reads a model of one name and dtype once; whoever gets it leaves it as it was."""
    from coattn.hf.load import Loaded, choose_device, choose_dtype, load

    @cache
    def kept(name: str, dtype: torch.dtype, device: torch.device) -> Loaded:
        return load(name, dtype=dtype, device=device)

    def shared(name: str, *, dtype: str = "auto", device: str = "auto", **more: object) -> Loaded:
        place = choose_device(device)
        return kept(str(name), choose_dtype(dtype, place), place)

    with mock.patch("coattn.hf.load.load", shared), mock.patch("coattn.engine.model.load", shared):
        yield
