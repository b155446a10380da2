"""Triton's interpreter is slow: without a GPU its kernels are tested by the whole suite, not by the quick set."""

from pathlib import Path

import pytest
from tests.kernels.triton.addresses import addresses as addresses

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
