"""Shared by all tests: determinism, and a reason for what cannot run here."""

import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from tests.tiers import sample, timed

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels then run on the CPU


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sample(config, items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    with timed(item.nodeid):
        return (yield)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """A command that ran in this process leaves no level or handler behind, which another test would see."""
    loggers = [logging.getLogger(name) for name in ("coattn", "coattn.serve", "coattn.serve.gate")]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    yield
    for each, level, handlers in before:
        each.setLevel(level)
        each.handlers[:] = handlers


@pytest.fixture(scope="session")
def _sketches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sketches")


@pytest.fixture(autouse=True)
def _measured(_sketches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What engines measure of models in tests is no user's."""
    monkeypatch.setattr("coattn.hf.sketches.folder", lambda: _sketches)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that takes this runs on the CPU, and on the GPU where there is one."""
    return torch.device(request.param)
