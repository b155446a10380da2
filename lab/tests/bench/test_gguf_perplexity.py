"""`gguf_perplexity.py` on a tiny file: packed and unpacked are the same numbers, and a wrong matrix is found."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")

from tests.hf.gguf_files import write

SCRIPT = Path(__file__).parents[2] / "scripts" / "gguf_perplexity.py"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_file_beside_its_numbers(wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", "Q4_K")
    (tmp_path / "text.txt").write_text("Once upon a time there was a cache. " * 40)
    given = f"--text {tmp_path}/text.txt --tokens 256 --window 128 --piece 48 --device cpu --out {tmp_path}/found.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "m.gguf"), *given.split()])
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path))
    script = runpy.run_path(str(SCRIPT))
    if wrong:
        own = script["by_transformers"]

        def other(*args: Any) -> Any:
            model = own(*args)
            model.model.layers[1].mlp.up_proj.weight.data *= 3
            return model

        script["main"].__globals__["by_transformers"] = other
    assert script["main"]() == wrong
    (row,) = json.loads((tmp_path / "found.json").read_text())
    assert row["weight_bytes"] < 1.1 * row["file_bytes"] < row["unpacked_bytes"]
    assert (abs(row["difference"]) > 1e-3) == wrong
    assert row["matrix"] == "model.layers.1.mlp.up_proj" or not wrong
    assert (row["largest_of_a_matrix"] > 0.5) == wrong
