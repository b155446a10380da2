"""Two nodes on loopback: sessions stay where they are, and a replica that is killed is answered for by the other."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from tests.tools.evaluate.tiny import save_model

from coattn.serve.cluster.options import Options

CHECKS = Path(__file__).resolve().parents[3] / "scripts" / "ray_checks.py"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: the extra ray")
def test_a_replica_is_killed_midway(tmp_path: Path) -> None:
    """A short version of `scripts/ray_checks.py`, in a process of its own."""
    model = save_model(tmp_path / "model")
    small = ["--turns", "5", "--tokens", "6", "--max-length", "512", "--words", "24", "--chunk", "1"]
    command = [sys.executable, str(CHECKS), "--model", model, *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "30 requests: " in done.stdout
    assert "while it read a prompt: answered by" in done.stdout


def test_the_example_is_one_that_is_taken() -> None:
    example = yaml.safe_load((CHECKS.parents[1] / "examples" / "ray.yaml").read_text())
    (app,) = example["applications"]
    assert app["import_path"] == "coattn.serve.cluster.app:build"
    options = Options.read(app["args"])
    assert options.deployment()["autoscaling_config"]["max_replicas"] == 4


def test_a_check_that_sees_a_session_move_says_so() -> None:
    """The check can fail."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("ray_checks", CHECKS)
    assert spec is not None
    assert spec.loader is not None
    checks = module_from_spec(spec)
    sys.modules[spec.name] = checks
    spec.loader.exec_module(checks)

    def wrong(*turns: tuple[str, str]) -> str:
        made = [checks.Turn("s", replica, end, cached=16) for replica, end in turns]
        return " ".join(checks.judge(checks.Run("", 1, made, killed="a"), len(turns)))

    ok = "answered"
    assert wrong(("b", ok), ("b", ok)) == ""
    assert wrong(("a", ok), ("a", "failed"), ("b", ok)) == ""
    assert "moved" in wrong(("b", ok), ("a", ok))
    assert "moved" in wrong(("a", ok), ("b", ok), ("c", ok))
    assert "cut off" in wrong(("a", ok), ("a", "cut off without an error"))
