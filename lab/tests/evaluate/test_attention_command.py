"""`coattn-lab eval attention` on a small random model."""

from __future__ import annotations

import json
from pathlib import Path

from lab.tests.run import coattn_lab
from tests.tools.evaluate.tiny import model_and_text

WINDOWS = ["--prefill", "60", "--decode", "4", "--stride", "100", "--length", "300"]


def test_attention(tmp_path: Path) -> None:
    folder, target = model_and_text(tmp_path), tmp_path / "attention.json"
    where = ("--model", str(folder), "--text", str(folder / "text.txt"))
    size = ("--budget", "16", "--block", "4", "--out", str(target))
    done = coattn_lab("eval", "attention", *WINDOWS, *size, *where, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["steps"], found["drift"]["budget"]) == (12, 16)
    for name in ("locality", "drift", "query_ahead"):
        assert target.with_suffix(f".{name}.png").read_bytes().startswith(b"\x89PNG")
    done = coattn_lab("eval", "attention", *where, "--prefill", "60", "--decode", "1")
    assert done.returncode == 0, done.stderr
    assert "unknown by true mass" in done.stdout
    done = coattn_lab("eval", "attention", "--budget", "8", *where)
    assert done.returncode == 2
    assert "less than a --block" in done.stderr
