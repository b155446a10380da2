"""`capped.py` on tiny shapes: every figure that is printed."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "capped.py"
OPTIONS = "--shapes tiny:int4 --context 1200 --cap 1GiB --chunk 50 --steps 3 --device cpu"


@pytest.mark.slow
def test_every_method_stands_beside_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *OPTIONS.split(), "--out", str(out)])
    assert runpy.run_path(str(SCRIPT))["main"]() == 0
    rows = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["auto", "cpu"]
    for row in rows.values():
        assert row["plan"]["fits"]
        assert row["kv_bytes"] <= row["plan"]["kv"] + (1 << 20)
        assert row["host_kv_bytes"] > 0
        assert min(row["step_ms"], *row["chunk_s"].values()) > 0
        assert row["prompt_s"] == pytest.approx(24 * sum(row["chunk_s"].values()) / 2, rel=0.5)
    said = capsys.readouterr().out
    assert said.count("fits; no GPU") == 2
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--methods", "full", "--context", "9000", "--cap", "700MiB"])
    assert runpy.run_path(str(SCRIPT))["main"]() in (0, 1)
    assert "does not fit" in capsys.readouterr().out
