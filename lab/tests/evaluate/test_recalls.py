"""Recall intervals: from known drift, from a model, and into a method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.hf.families import tiny

from coattn.cache.ledger import Ledger
from coattn.errors import ConfigError
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.parts.maintenance.recall.recall import Recall
from coattn.step.runtime import Runtime
from coattn.tools.evaluate.windows import Windows
from coattn.types import LayerShape, Step
from coattn_lab.evaluate.recalls import Drifting, profile


def test_an_interval_is_the_longest_whose_mean_share_is_under_beta() -> None:
    drifting = Drifting(budget=100, block=10)
    # one block of four is new at every step: a lag of n steps misses min(n, 4) blocks, 10% of the budget each
    for step in range(20):
        drifting.add(0, torch.arange(step, step + 4).expand(2, 3, 4))
        drifting.add(1, torch.arange(4).expand(2, 3, 4))
    torch.testing.assert_close(drifting.ratios(0)[:4], torch.tensor([0.1, 0.15, 0.2, 0.25], dtype=torch.float64))
    found = drifting.intervals(0.21)
    assert found["recall_intervals"] == [3, 19]
    assert found["cpu_ratios"] == pytest.approx([0.2, 0.0])
    assert drifting.intervals(0.05)["recall_intervals"] == [1, 19]
    assert found["interval_mean"] == 11


def test_windows_are_not_compared_with_each_other() -> None:
    drifting = Drifting(budget=100, block=10)
    drifting.add(0, torch.arange(4).expand(1, 1, 4))
    drifting.forget()
    drifting.add(0, torch.arange(10, 14).expand(1, 1, 4))
    assert len(drifting.ratios(0)) == 0


def test_a_model_is_profiled_and_the_file_is_a_parameter(tmp_path: Path) -> None:
    model = tiny("qwen3")
    ids = torch.randint(3, 160, (120,), generator=torch.Generator().manual_seed(0))
    found = profile(model, ids, Windows((0,), 100, 20), budget=32, block=8, beta=0.3)
    assert len(found["recall_intervals"]) == 3
    assert all(1 <= n <= 19 for n in found["recall_intervals"])
    path = tmp_path / "intervals.json"
    path.write_text(json.dumps(found))
    assert compose(METHODS["scout"], recall_file=str(path)).params["recall_file"] == str(path)


def test_every_layer_recalls_at_its_own_interval(tmp_path: Path) -> None:
    path = tmp_path / "intervals.json"
    path.write_text('{"recall_intervals": [0, 2, 5]}')
    shape = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))
    method = compose(METHODS["scout"], recall_file=str(path), block=4, budget=24)
    runtime = Runtime([shape] * 3, method, Ledger(), 1, None)
    maintenance, draws = runtime.groups[0].maintenance, torch.Generator().manual_seed(0)
    assert isinstance(maintenance, Recall)
    moved: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for new, length in [(80, 0), *((1, 80 + i) for i in range(21))]:
        step = Step.of((0,), (length,), (new,))
        running = runtime.begin(step)
        before = {layer: held.clone() for layer, held in maintenance.residency.held.items()}
        for layer in range(3):
            runtime.attend(running, layer, *(torch.randn(new, h, 16, generator=draws) for h in (4, 2, 2)), 0.4)
        runtime.commit(running)
        for layer, held in maintenance.residency.held.items():
            if not torch.equal(before[layer], held):
                moved[layer].append(step.lengths[0])
    assert moved[0] == []
    assert moved[1]
    assert all((n + 1) % 2 == 0 for n in moved[1])
    assert moved[2]
    assert all((n + 2) % 5 == 0 for n in moved[2])
    with pytest.raises(ConfigError, match="intervals for 3 layers"):
        Runtime([shape] * 4, method, Ledger(), 1, None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recall_intervals": [1.5]}', '{"recall_intervals": 3}'])
def test_bad_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "intervals.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a JSON file with a list 'recall_intervals'"):
        compose(METHODS["scout"], recall_file=str(path))
    with pytest.raises(ConfigError, match="There is no file"):
        compose(METHODS["scout"], recall_file=str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        compose(METHODS["scout"], recall_file=str(tmp_path))
