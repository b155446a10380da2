"""Decode steps of a model with padding rows, as they are captured on a GPU but without one, against plain ones."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.hf.families import FAMILIES, tiny
from tests.hf.test_table import small
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.engine.runner.runner import Runner
from coattn.hf.forward import Session
from coattn.hf.logits import head
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.step.runtime import Runtime
from coattn.types import Phase, Step

SLOTS, LENGTH = 4, 256


class Padded(Runner):
    """Runs decode steps as they are captured on a GPU, with padding rows."""

    def __init__(self, session: Session, runtime: Runtime) -> None:
        super().__init__(session, runtime, SLOTS)

    def decode(self, slots: Sequence[int], tokens: Sequence[int], history: Sequence[int]) -> Tensor:
        step = Step(Phase.DECODE, tuple(slots), tuple(history), (1,) * len(slots))
        running = self.runtime.begin(step)
        more = 2 if len(slots) <= 2 else SLOTS - len(slots)
        capture = self.runtime.begin_capture(len(slots) + more, self.runtime.reaches_host(step))
        with torch.no_grad():
            ids, positions = (torch.tensor([*x, *[0] * more]) for x in (tokens, history))
            logits = head(self.session.model, self.session.hidden(self.runtime, capture, ids, positions))
            self.runtime.join_side(capture)
        self.runtime.commit(running)
        return logits[: len(slots)]


CASES = [
    ("full", {"block": 8}),
    ("cpu", {"block": 8, "window_blocks": 1}),
    ("hgca", {"block": 8, "window_blocks": 2, "beta": 0.5}),
    ("scout", {"block": 8, "budget": 32, "window_blocks": 1, "recall_interval": 3, "ahead_from": 1}),
    ("scout", {"block": 8, "budget": 32, "recall_interval": 2, "pool_blocks": 9, "dense_layers": 1, "ahead_from": 2}),
    ("infinigen", {"block": 8, "budget": 12, "alpha": 1.5, "dense_layers": 1, "ahead_from": 1, "partial": 0.4}),
    ("hcattention", {"block": 8, "window_blocks": 2, "groups": 4, "centroids": 32, "tau": 0.8, "sink_blocks": 1}),
]


@pytest.mark.parametrize(("method", "params"), CASES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5_text"])
def test_padding_rows_change_nothing(family: str, method: str, params: dict[str, Any]) -> None:
    composed = compose(find_method(method), **params)
    hybrid = family not in FAMILIES
    if hybrid and any(map(composed.build().schedule.predicts, range(4))):
        return
    session = Session(small(family, 0) if hybrid else tiny(family))
    given, of_states = (Ledger(), SLOTS, LENGTH), session.states
    runtimes = [Runtime(session.layers, composed, *given, fixed=True, padding=True, states=of_states) for _ in range(2)]
    plain, padded = Runner(session, runtimes[0], SLOTS), Padded(session, runtimes[1])
    draws = torch.Generator().manual_seed(1)
    history: dict[int, int] = {}

    def join(slot: int, tokens: int) -> None:
        ids = torch.randint(3, 160, (tokens,), generator=draws).tolist()
        for runner in (plain, padded):
            runner.extend(slot, ids, 0, True)
        history[slot] = tokens

    def steps(count: int) -> None:
        slots = sorted(history)
        for _ in range(count):
            tokens = torch.randint(3, 160, (len(slots),), generator=draws).tolist()
            lengths = [history[slot] for slot in slots]
            want, got = (runner.decode(slots, tokens, lengths) for runner in (plain, padded))
            torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)
            for slot in slots:
                history[slot] += 1

    join(2, 30)
    steps(3)
    join(0, 9)
    steps(8)
    join(3, 70)
    steps(12)
    for runner in (plain, padded):
        runner.runtime.truncate(2, history[2], 0)
    del history[2]
    steps(5)
    join(1, 2)
    steps(10)
    session.close()
    for runtime in runtimes:  # the pool may still copy what hgca keeps
        runtime.release()
