"""Commands and examples that name the embedded model share its weights within a test module."""

from collections.abc import Iterator
from functools import cache
from typing import Any
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

    def shared(name: str, *, dtype: str = "auto", device: str = "auto", check: Any = None, **more: object) -> Loaded:
        place = choose_device(device)
        found = kept(str(name), choose_dtype(dtype, place), place)
        if check is not None:  # which also hears of the tokenizer
            check(found.tokenizer, found.positions)
        return found

    with mock.patch("coattn.hf.load.load", shared), mock.patch("coattn.engine.model.load", shared):
        yield
