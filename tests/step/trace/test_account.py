"""What a trace asks of the parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.engine.small import greedy, llm, prompt

from coattn.types import Step


@pytest.mark.parametrize("method", ["cpu", "scout"])
def test_each_part_reports_once_for_a_trace(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report may copy from the GPU, layer by layer."""
    asked: Counter[int] = Counter()

    def report(said: Callable[[Step], dict[str, Any]], number: int, step: Step) -> dict[str, Any]:
        asked[number] += 1
        return said(step)

    with llm(method) as engine:
        engine.generate(prompt(40), greedy(4, ignore_eos=True))
        for group in engine.runner.runtime.groups:
            for part in group.all():
                monkeypatch.setattr(part, "report", partial(report, part.report, id(part)))
        trace = engine.trace()
        assert trace is not None
        assert trace.attended_gpu + trace.attended_host > 0
        monkeypatch.undo()
    assert set(asked.values()) == {1}
