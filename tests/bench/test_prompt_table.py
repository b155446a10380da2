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
    rows = [{"method": name, "total_s": s} for name, s in (("full", 10.0), ("scout", 6.0), ("transformers", 30.0))]
    assert "scout / full 0.60 (wanted <= 1.10, yes)" in summary(tmp_path, "requests", rows)
    assert "full / old full 0.50 (wanted <= 0.75, yes)" in summary(
        tmp_path, "old", [{"method": "full", "total_s": 20.0}]
    )
    assert "scout / full 0.60 (wanted <= 0.67, yes)" in summary(tmp_path, "driven", rows)


def test_lines_are_named() -> None:
    def checks(*given: str) -> subprocess.CompletedProcess[str]:
        script = SCRIPT.with_name("prompt_checks.py")
        return subprocess.run([sys.executable, script, *given], capture_output=True, text=True, check=False)

    said = checks("--help")
    assert said.returncode == 0
    assert "beside" in said.stdout
    assert "there is no line 'beneath'" in checks("out", "beneath").stderr
