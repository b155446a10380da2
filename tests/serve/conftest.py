"""One server for all tests of a process that do not need their own; a reason where the extra is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import openai
    from tests.serve.running import Running

PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "openai", "httpx2")
MISSING = [name for name in PACKAGES if not find_spec(name)]


class Missing(pytest.Module):
    """A file of tests whose packages are not here."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"needs {', '.join(MISSING)}: the extras serve and dev", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Missing.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    from tests.serve.running import serving

    with serving() as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
