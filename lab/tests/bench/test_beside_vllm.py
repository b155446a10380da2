"""`beside_vllm.py`: what it measures of an engine, that it goes on, and that it does without vLLM."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coattn_lab.bench.stream import Item

SCRIPT = Path(__file__).parents[2] / "scripts" / "beside_vllm.py"
OPTIONS = (
    "--shapes tiny --batch 1,2 --context 48 --prompt 64 --count 3 --lengths uniform:20:60 --steps 8 --device cpu "
    "--dtype float32"
)


def run(out: Path, *more: str, vllm: Path | None = None) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, str(SCRIPT), str(out), *OPTIONS.split(), *more]
    given += [] if vllm is None else ["--vllm", str(vllm)]
    return subprocess.run(given, capture_output=True, text=True, check=False, env=dict(os.environ))


class Slow:
    """Reads a prompt a step, then a token for all."""

    vocabulary = 50

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.left: dict[int, int] = {}

    def submit(self, name: int, ids: list[int], new: int) -> None:
        assert len(ids) > 1
        assert max(ids) < self.vocabulary
        self.waiting.append(name)
        self.left[name] = new

    def step(self) -> dict[int, int]:
        if self.waiting:
            return self._give([self.waiting.pop(0)])
        return self._give(list(self.left))

    def _give(self, names: list[int]) -> dict[int, int]:
        for name in names:
            self.left[name] -= 1
        self.left = {name: count for name, count in self.left.items() if count}
        return dict.fromkeys(names, 1)


def test_only_steps_in_which_all_decode_are_timed() -> None:
    script: dict[str, Any] = runpy.run_path(str(SCRIPT))
    found = script["decode"](Slow(), 3, 40, 16)
    assert found["steps"] == 16 + 4 - 1 - 3  # the first token comes with the prompt, and three steps warm up
    assert 0 < found["ms_per_step"] <= found["p99_ms"]
    assert script["prompt"](Slow(), 30)["seconds"] > 0
    made = script["requests"](Slow(), [Item(0, 20, 5), Item(0, 30, 5)])
    assert made["tokens_per_s"] == pytest.approx(10 / made["seconds"])


@pytest.mark.slow
def test_without_vllm_coattn_alone_is_measured_stage_by_stage(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "vllm"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no kernels for this machine')")
    first = run(tmp_path / "out", "--minutes", "0", vllm=broken.parent)
    assert first.returncode == 3, first.stderr
    assert len(list((tmp_path / "out").glob("*.json"))) == 1
    done = run(tmp_path / "out", "--minutes", "5", vllm=broken.parent)
    assert done.returncode == 0, done.stderr
    assert "vLLM cannot be imported: ImportError: no kernels for this machine" in done.stderr
    assert "coattn alone was measured" in done.stdout
    names = {path.stem for path in (tmp_path / "out").glob("*.json")}
    assert names == {"coattn_decode_1x48", "coattn_decode_2x48", "coattn_prompt_64", "coattn_requests_3"}
    row = json.loads((tmp_path / "out" / "coattn_decode_2x48.json").read_text())
    assert row["ms_per_step"] > 0
    assert row["shapes"] == "tiny"
    assert "| decode 2x48 |" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.slow
def test_both_stand_side_by_side_with_how_many_times_as_long_one_takes(tmp_path: Path) -> None:
    """An engine with vLLM's interface, which takes its time."""
    fake = tmp_path / "fake" / "vllm"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(
        "import time\n"
        "from types import SimpleNamespace as Made\n"
        "class SamplingParams:\n"
        "    def __init__(self, max_tokens, ignore_eos, temperature, detokenize):\n"
        "        self.most = max_tokens\n"
        "class LLM:\n"
        "    def __init__(self, **options):\n"
        "        assert options['load_format'] == 'dummy' and not options['enable_prefix_caching']\n"
        "        self.llm_engine, self.going = self, {}\n"
        "    def add_request(self, name, prompt, params):\n"
        "        self.going[name] = (params.most, [])\n"
        "    def step(self):\n"
        "        time.sleep(0.002)\n"
        "        for _, ids in self.going.values(): ids.append(1)\n"
        "        made = [Made(request_id=n, outputs=[Made(token_ids=list(i))]) for n, (_, i) in self.going.items()]\n"
        "        self.going = {n: (m, i) for n, (m, i) in self.going.items() if len(i) < m}\n"
        "        return made\n"
    )
    done = run(tmp_path / "out", vllm=fake.parent)
    assert done.returncode == 0, done.stderr
    both = {s: json.loads((tmp_path / "out" / f"{s}_decode_2x48.json").read_text()) for s in ("coattn", "vllm")}
    assert both["vllm"]["ms_per_step"] > 2
    ratio = both["coattn"]["ms_per_step"] / both["vllm"]["ms_per_step"]
    assert f"| {ratio:.2f} |" in next(line for line in done.stdout.splitlines() if "decode 2x48" in line)
