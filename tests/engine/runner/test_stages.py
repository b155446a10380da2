"""A captured step on several devices: a graph for each, against the same steps layer by layer on one.

There is one GPU at most here, so both devices are that one: two caches, two graphs, two streams.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.engine.runner.test_runner import METHODS
from tests.hf.families import tiny

from coattn.cache.ledger import Ledger
from coattn.engine.runner.runner import Runner
from coattn.errors import WorkerError
from coattn.hf.division import Division
from coattn.hf.forward import Session
from coattn.hf.pipeline import PipelineStages
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.native.core import extension
from coattn.step.runtime import Runtime

SLOTS, LENGTH = 4, 256
CASES = [
    *(("llama", name) for name in ("full", "offload", "cpu", "quest", "hgca", "hcattention, keys", "auto", "h2o")),
    # other positions, norms and windows over a border; Gemma 3 turns its layers in two ways
    *((family, "cpu") for family in ("qwen3", "gemma2", "gemma3", "opt", "gpt_neox")),
]


class Pair:
    """The same model twice: layer by layer on one device, captured on two stages of it.

    layers: of the stages, of both models; left out, the plain one has none.
    """

    def __init__(self, family: str, method: str, params: dict[str, Any], layers: tuple[int, ...] | None = None) -> None:
        from coattn.engine.runner.capture import GraphRunner

        device = torch.device("cuda", torch.cuda.current_device())
        composed = compose(find_method(method), **params)
        one, two = (tiny(family, "cuda", torch.float32) for _ in range(2))
        division = Division((device, device), layers or (1, 2))
        self.pipeline = [PipelineStages(two, division), *([] if layers is None else [PipelineStages(one, division)])]
        session, divided = Session(one, None if layers is None else self.pipeline[1]), Session(two, self.pipeline[0])
        beside, self.ledger = Ledger(), Ledger()
        for ledger in (beside, self.ledger):
            ledger.divide(division.names, [None, None], [1, 1])
        self.plain = Runner(session, Runtime(session.layers, composed, beside, SLOTS, LENGTH, fixed=True), SLOTS)
        runtime = Runtime(divided.layers, composed, self.ledger, SLOTS, LENGTH, fixed=True)
        assert runtime.uncaptured() is None
        self.captured = GraphRunner(divided, runtime, SLOTS)
        self.vocabulary, self.history = divided.vocabulary, dict[int, int]()

    def join(self, slot: int, tokens: int) -> None:
        ids = torch.randint(0, self.vocabulary, (tokens,)).tolist()
        for runner in (self.plain, self.captured):
            runner.extend(slot, ids, 0, True)
        self.history[slot] = tokens

    def steps(self, count: int, atol: float = 2e-4) -> None:
        slots = sorted(self.history)
        for _ in range(count):
            tokens = torch.randint(0, self.vocabulary, (len(slots),)).tolist()
            history = [self.history[slot] for slot in slots]
            want, got = (runner.decode(slots, tokens, history) for runner in (self.plain, self.captured))
            error = float((got - want).abs().max())
            assert error < atol, history
            for slot in slots:
                self.history[slot] += 1

    def close(self) -> None:
        self.captured.close()
        self.plain.close()
        for pipeline in self.pipeline:
            pipeline.close()
        assert self.ledger.held == {"gpu": 0, "host": 0}


@pytest.fixture
def pair() -> Iterator[Any]:
    made: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        torch.manual_seed(0)
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "name"), CASES)
def test_two_graphs_equal_plain_steps(family: str, name: str, pair: Any) -> None:
    method, params = METHODS[name]
    run = pair(family, method, params)
    run.join(0, 9)
    run.steps(3)
    run.join(2, 70)
    run.steps(30)
    stages = next(iter(run.captured._captured.values())).stages
    assert len(stages) == 2
    assert not stages[0].carried
    assert stages[1].carried[0][0].shape[-1] == run.captured.session.model.config.hidden_size
    assert stages[1].stream != stages[0].stream


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [(1, 2), (2, 1)])
def test_scout_predicts_within_each_device_alone(layers: tuple[int, int], pair: Any) -> None:
    """What the CPU attends to it attends with the predicted query, so both are divided: the plain steps, too, have a
    layer whose query is the real one."""
    method, params = METHODS["scout"]
    run = pair("llama", method, {**params, "budget": 512, "pool_blocks": 3}, layers=layers)
    run.join(1, 90)
    run.steps(30)


@pytest.mark.gpu
def test_both_sections_are_traced_on_one_clock(pair: Any) -> None:
    method, params = METHODS["cpu"]
    run = pair("llama", method, params)
    run.join(0, 90)
    run.steps(5)
    found = run.captured.trace()
    assert sorted(span.layer for span in found.spans) == list(range(len(run.captured.session.layers)))
    assert all(found.begin <= span.seen <= span.done <= found.end for span in found.spans)
    assert 0 <= found.gpu_idle <= 1


@pytest.mark.gpu
def test_a_stalled_worker_fails_one_step_and_the_next_is_captured_anew(pair: Any) -> None:
    method, params = METHODS["cpu"]
    run = pair("llama", method, params)
    run.join(0, 60)
    run.steps(2)
    extension.inject_fault("stall", 4.0)
    with pytest.raises(WorkerError):
        run.captured.decode([0], [1], [run.history[0]])
    extension.inject_fault("")
    run.steps(3)
