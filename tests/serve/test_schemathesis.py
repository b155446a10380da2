"""Requests made up from our own schema: no server error. `scripts/serve_checks.sh fuzz` is the long version."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from tests.serve.running import HELLO, Running


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis: the extra checks")
def test_our_schema_is_kept(server: Running) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    options = ["--checks", "not_a_server_error", "--phases", "fuzzing", "--exclude-path", "/v1/coattn/live"]
    limits = ["--max-examples", "5", "--max-time", "20", "--request-timeout", "30", "--suppress-health-check", "all"]
    done = subprocess.run([*command, *options, *limits], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert server.post("/v1/chat/completions", HELLO).status_code == 200
