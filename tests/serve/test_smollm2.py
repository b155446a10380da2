"""The embedded model behind a server: calls and schemas hold, though it is small and was taught neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.serve.running import serving

import coattn
from coattn.hf.load import load
from coattn.serve.settings import Settings

LOAD = Path(__file__).resolve().parents[2] / "scripts" / "serve_load.py"


@pytest.mark.model
@pytest.mark.slow
def test_calls_and_schemas_are_valid() -> None:
    """A short version of `scripts/serve_checks.sh forms`."""
    loaded = load("smollm2", dtype="float32", device="cpu")
    with serving(
        Settings(port=0, drain=5), lambda: coattn.LLM(loaded, "full", max_batch=4, max_length=768), wait=False
    ) as server:
        server.until(lambda: server.service.engine.state == "ready", 120)
        command = [sys.executable, str(LOAD), "forms", server.url, "--count", "4"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "4 of 4 answers are valid" in done.stdout
