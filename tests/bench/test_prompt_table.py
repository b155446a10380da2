"""The summary lines of `scripts/prompt_checks.sh`: ratios beside what is wanted, whatever was refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prompt_table.py"


def summary(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows}))
    done = subprocess.run([sys.executable, SCRIPT, folder, name, "9"], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    return done.stdout


def test_one_line_each(tmp_path: Path) -> None:
    full = {"method": "full", "chunk": 8192, "seconds": 1.2, "floor_ratio": 1.25, "peer_ratio": 0.95}
    scout = {"method": "scout", "chunk": 8192, "seconds": 1.5}
    said = summary(tmp_path, "qwen", [full, scout])
    assert said.startswith(
        "qwen in 9 s: full / floor 1.25 (wanted <= 1.30, yes); full / Transformers 0.95 (wanted <= 0.90, NO)"
    )
    assert "scout / full at 8192 1.25 (wanted <= 1.15, NO) | full 8192 1.20 s" in said
    assert "ValueError: scout: no room" in summary(tmp_path, "qwen", [full, {**scout, "refused": "no room"}])
    taken = {"full": 10.0, "scout": 6.0, "transformers": 30.0}
    rows: list[dict[str, Any]] = [
        {"method": name, "total_s": seconds, "requests": 3} for name, seconds in taken.items()
    ]
    assert summary(tmp_path, "requests", rows[:1]) == "requests in 9 s: full 10.00 s for 3 requests\n"
    assert "scout / full 0.60 (wanted <= 1.10, yes) | scout 6.00 s for 3 requests" in summary(
        tmp_path, "scout", rows[1:2]
    )
    assert "scout / full 0.60 (wanted <= 0.67, yes) |" in summary(tmp_path, "driven", rows)
    line = {"started_s": 0.0, "first_s": 2.0, "ended_s": 8.3, "new_tokens": 64}
    rows[2]["timeline"] = [line, dict(line), {**line, "started_s": 8.3, "first_s": 20.0, "ended_s": 26.3}]
    assert "full / Transformers 0.33 (wanted <= 0.40, yes)" in summary(tmp_path, "transformers", rows[2:])
    assert "full / old full 0.50 (wanted <= 0.75, yes)" in summary(
        tmp_path, "old", [{"method": "full", "total_s": 20.0}]
    )
    # two batches of three requests, 0.1 s a step: 30 s and 960 steps of each
    assert "full / Transformers by its steps 0.05 (wanted <= 0.17, yes)" in summary(tmp_path, "driven", rows)


def test_lines_are_named() -> None:
    def checks(*given: str) -> subprocess.CompletedProcess[str]:
        script = SCRIPT.with_name("prompt_checks.py")
        return subprocess.run([sys.executable, script, *given], capture_output=True, text=True, check=False)

    said = checks("--help")
    assert said.returncode == 0
    assert "beside" in said.stdout
    assert "there is no line 'beneath'" in checks("out", "beneath").stderr


def test_where_the_time_goes() -> None:
    """Kernels by their names; what runs at the same time counts once against the gaps."""
    sys.path.insert(0, str(SCRIPT.parent))
    import prompt_where

    spans = [
        (0.0, 4.0, "nvjet_sm90_tst_192x192"), (3.0, 5.0, "_attend"), (8.0, 9.0, "cudnn_generated_fort_native_sdpa"),
        (8.5, 9.5, "_gated"), (5.0, 8.0, "Memcpy DtoH"),
    ]  # fmt: skip
    found = prompt_where.table(spans, 12.0)
    assert found == {
        "copies": 3.0, "attention of prompts": 1.0, "attention of decode steps": 2.0, "products": 4.0,
        "other kernels": 1.0, "no kernel": 5.5, "wall": 12.0,
    }  # fmt: skip
    assert prompt_where.largest(spans, 3) == [("_gated", 1.0, 1)]
    row = {"milliseconds": found, "largest": [], "host": [{"host": "read", "calls": 2, "seconds": 1.5, "longest_s": 1}]}
    assert "products" in "\n".join(prompt_where.lines(row))
