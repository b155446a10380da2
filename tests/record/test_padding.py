"""Decode steps of a model over frames, as they are recorded for a GPU but without one, against plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hf.families import tiny
from torch import Tensor

from coattn.engine.runner import EagerRunner
from coattn.hf.forward import Session
from coattn.hf.logits import head
from coattn.method import compose
from coattn.methods import find_method
from coattn.record.frames import Frames
from coattn.runtime import Runtime
from coattn.store.ledger import Ledger
from coattn.types import Phase, Step

SLOTS, LENGTH = 4, 256


class Framed(EagerRunner):
    """Runs decode steps as they would be recorded, with rows that are nobody's."""

    def __init__(self, session: Session, runtime: Runtime) -> None:
        super().__init__(session, runtime, SLOTS)
        self.frames = Frames(runtime, SLOTS)

    def decode(self, slots: Any, tokens: Any, history: Any) -> Tensor:
        step = Step(Phase.DECODE, tuple(slots), tuple(history), (1,) * len(slots))
        self.runtime.begin(step)
        far = self.frames.write(step)
        rows = 4 if len(slots) > 2 else len(slots)
        with self.frames.recording(rows, far), torch.no_grad():
            more = rows - len(slots)
            ids, positions = (torch.tensor([*x, *[0] * more]) for x in (tokens, history))
            logits = head(self.session.model, self.session.hidden(self.runtime, ids, positions))
            self.runtime.rejoin()
        self.runtime.commit()
        return logits[: len(slots)]


@pytest.mark.parametrize(
    "params",
    [
        {"window_blocks": 1, "recall_interval": 3, "bound": -1.0},
        {"window_blocks": 2, "recall_interval": 2, "bound": 0.9},
        {"recall_interval": 4, "dense_layers": 1, "bound": 1.0},
        {"recall_interval": 0, "resident": 9, "bound": -1.0},
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_framed_steps_equal_plain_ones(family: str, params: dict[str, Any]) -> None:
    composed = compose(find_method("scout"), block=8, budget=32, **params)
    session = Session(tiny(family))
    runtimes = [Runtime(session.layers, composed, Ledger(), SLOTS, LENGTH, fixed=True, spare=True) for _ in range(2)]
    plain, framed = EagerRunner(session, runtimes[0], SLOTS), Framed(session, runtimes[1])
    draws = torch.Generator().manual_seed(1)
    history: dict[int, int] = {}

    def join(slot: int, tokens: int) -> None:
        ids = torch.randint(3, 160, (tokens,), generator=draws).tolist()
        for runner in (plain, framed):
            runner.extend(slot, ids, 0, True)
        history[slot] = tokens

    def steps(count: int) -> None:
        slots = sorted(history)
        for _ in range(count):
            tokens = torch.randint(3, 160, (len(slots),), generator=draws).tolist()
            lengths = [history[slot] for slot in slots]
            want, got = (runner.decode(slots, tokens, lengths) for runner in (plain, framed))
            torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)
            for slot in slots:
                history[slot] += 1

    join(2, 30)
    steps(3)
    join(0, 9)
    steps(12)
    join(3, 70)
    steps(20)
    for runner in (plain, framed):
        runner.forget(2, history[2])
    del history[2]
    steps(5)
    join(1, 2)
    steps(20)
    session.close()
