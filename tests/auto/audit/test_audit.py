"""Audits: what they say of a case is what textbook attention says, and the floor follows it."""

import math
import random
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from coattn.auto.audit import audit as audits
from coattn.auto.audit.audit import Audit, Chosen, Job
from coattn.auto.audit.control import AIM, GAIN, LAYER_GAIN, LEAST, START, Control
from coattn.auto.audit.measure import Finding
from coattn.auto.audit.tally import Mean, Tally, student
from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Selection, Step

HEADS, KV_HEADS, DIM, SCALE, BLOCK = 6, 2, 16, 0.4, 8
GROUP = HEADS // KV_HEADS
SINKS = torch.linspace(-1, 4, HEADS)
"""Of the second layer."""


def audits_of(runtime: Runtime) -> list[Audit]:
    return [audit for audit in runtime.audits() if isinstance(audit, Audit)]


class World:
    """Two layers whose keys, values, queries, outputs and states are all known."""

    def __init__(self, seqs: int = 2, **params: Any) -> None:
        shape = LayerShape(HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
        composed = compose(METHODS["auto"], **{"block": BLOCK, "window_blocks": 2, **params})
        layers = [shape, replace(shape, sink_logits=SINKS)]
        self.runtime = Runtime(layers, composed, Ledger(), seqs, 256, fixed=True, padding=True)
        self.draws = torch.Generator().manual_seed(3)
        self.kv = [[[torch.empty(0, KV_HEADS, DIM)] * 2 for _ in range(2)] for _ in range(seqs)]
        self.lengths = [0] * seqs
        self.seen: list[tuple[Chosen, Finding]] = []
        self.last: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        audits = audits_of(self.runtime)
        if audits:
            audit = audits[0]
            take, note = audit._take, audit.note

            def taken(chosen: Chosen, found: Finding) -> None:
                self.seen.append((chosen, found))
                self.check(chosen, found)
                take(chosen, found)

            def noted(call: Any, table: Any, selection: Selection, states: Any, out: Tensor) -> None:
                by = {work.kind: state.lse for state, work in zip(states, selection.works, strict=True)}
                if "scored" in by:
                    attended = torch.cat([by["near"], by["scored"][:, :-1]], 1).logsumexp(1)
                    if call.layer:
                        attended = torch.logaddexp(attended, SINKS)
                    self.last[call.layer] = call.q[:, 0], out, attended, by["scored"][:, -1]
                note(call, table, selection, states, out)

            audit._take, audit.note = taken, noted  # type: ignore[method-assign]

    def step(self, *new: int, padded: int = 0) -> None:
        step = Step.of(tuple(range(len(new))), tuple(self.lengths[: len(new)]), new)
        running = self.runtime.begin(step)
        if padded:
            capture = self.runtime.begin_capture(len(new) + padded, host=True)
        self.lengths[: len(new)] = step.lengths
        for layer in range(2):
            q, k, v = (torch.randn(step.tokens, n, DIM, generator=self.draws) for n in (HEADS, KV_HEADS, KV_HEADS))
            for slot, (start, end) in enumerate(step.spans):
                own = self.kv[slot][layer]
                self.kv[slot][layer] = [torch.cat([own[0], k[start:end]]), torch.cat([own[1], 2 * v[start:end] + 1])]
            v = 2 * v + 1
            if padded:
                q, k, v = (torch.cat([x, torch.ones(padded, *x.shape[1:])]) for x in (q, k, v))
            self.runtime.attend(capture if padded else running, layer, q, k, v, SCALE)
        self.runtime.commit(running)
        assert not any(audit.failed for audit in audits_of(self.runtime)), "what an audit raises is dropped"

    def check(self, chosen: Chosen, found: Finding) -> None:
        """The case by textbook attention."""
        k, v = (x[:, chosen.head].double() for x in self.kv[chosen.slot][chosen.layer])
        q, out, attended, left = (x[chosen.slot].double() for x in self.last[chosen.layer])  # rows are slots here
        own = slice(chosen.head * GROUP, (chosen.head + 1) * GROUP)
        scores = q[own] @ k.T * SCALE
        sinks = torch.full((GROUP, 1), -torch.inf).double() if chosen.layer == 0 else SINKS[own, None].double()
        scores = torch.cat([scores, sinks], 1)
        weights = scores.softmax(-1)[:, :-1]
        exact, mean = weights @ v, weights.sum(-1, keepdim=True) * v.mean(0)
        assert len(k) == chosen.length == self.lengths[chosen.slot]
        error = (out[own] - exact).norm() / (exact - mean).norm()
        missed = (1 - (attended[own] - scores.logsumexp(-1)).exp()).mean()
        estimated = torch.sigmoid(left[own] - attended[own]).mean()
        wanted = torch.stack([error, missed, estimated])
        measured = torch.cat([found.error, found.missed, found.estimated])
        torch.testing.assert_close(measured, wanted, rtol=1e-4, atol=1e-6)


@pytest.fixture
def audited() -> Iterator[World]:
    """Two sequences, and one case audited."""
    world = World(quality=0.7)
    world.step(90, 61)
    world.step(1, 1)
    yield world
    world.runtime.release()


def test_every_step_audits_one_case_of_each_sequence_as_the_textbook_says() -> None:
    world = World(quality=0.7)
    world.step(90, 61)
    for _ in range(40):
        world.step(1, 1)
    assert len(world.seen) == 80
    for slot in (0, 1):
        cases = [(chosen.layer, chosen.head) for chosen, _ in world.seen if chosen.slot == slot]
        for first in range(0, 40, 4):
            assert len(set(cases[first : first + 4])) == 4, "no head has a second turn before all have had one"
    assert max(float(found.missed) for _, found in world.seen) > 0.05
    audit = audits_of(world.runtime)[0]
    assert [tally.error.count for tally in (audit.of(0), audit.of(1))] == [40, 40]
    summary = world.runtime.report(Step.of((0, 1), (129, 100), (1, 1)))["audit"]
    assert summary["audits"] == 80
    assert summary["error_95"][0] <= summary["error"] <= summary["error_95"][1]
    world.runtime.release()


def test_a_captured_step_notes_the_same() -> None:
    world = World(seqs=4, quality=0.7)
    world.step(90, 61)
    for _ in range(6):
        world.step(1, 1, padded=2)
    assert len(world.seen) == 12
    world.runtime.release()


def test_what_lies_on_the_gpu_altogether_and_what_is_exact_is_not_audited() -> None:
    world = World(quality=0.7)
    world.step(9, 5)
    world.step(1, 1)
    assert not world.seen
    assert not World(quality=1.0).runtime.audits()
    assert not World(audit=False).runtime.audits()


def test_a_case_of_a_sequence_that_has_ended_counts_for_nothing(audited: World) -> None:
    audit = audits_of(audited.runtime)[0]
    job: Future[Finding] = Future()
    ids = audit.host.table.rows[0, :11].long()
    watched, before = audit.watched[0], audit.tally.error.count
    watched.job, watched.lag = Job(Chosen(0, 0, 0, 91), ids, job), 2
    audited.step(1, 1)
    assert watched.job is not None, "no step waits for it before its time"
    assert audit.tally.error.count == before + 1, "the other sequence is audited all the same"
    audited.runtime.truncate(0, audited.lengths[0], 0)
    audited.lengths[0] = 0
    audited.kv[0] = [[torch.empty(0, KV_HEADS, DIM)] * 2 for _ in range(2)]
    one = torch.ones(1, dtype=torch.float64)
    job.set_result(Finding(one, one, one))
    assert audit.of(0).error.count == 0
    # and one whose blocks were exchanged for others
    again: Future[Finding] = Future()
    again.set_result(Finding(one, one, one))
    audit.watched[1].job = Job(Chosen(0, 0, 1, 62), audit.host.table.rows[1, :7].long() + 1, again)
    audit._collect(audit.watched[1])
    assert audit.tally.error.count == before + 1


def test_every_layers_error_settles_where_it_is_aimed_at() -> None:
    """Layers whose errors differ twentyfold, and grow with what is not waited for."""
    draws, control, target = random.Random(2), Control(0.02, 8.0, range(8)), 0.02
    assert control.wait(0, 3) == pytest.approx(START)
    found: dict[int, list[float]] = {layer: [] for layer in range(8)}
    for i in range(8000):
        layer = i % 8
        error = (0.08 if layer == 0 else 0.004 * (1 + layer)) * control.wait(0, layer) ** 0.7
        control.add(0, layer, error * draws.lognormvariate(0, 0.5))
        found[layer].append(error)
    for layer, errors in found.items():
        low = control.wait(0, layer)
        assert sum(errors[500:]) / 500 == pytest.approx(AIM * target, rel=0.2) or low > 7, layer
    assert control.wait(0, 0) < 0.3 < 1 < control.wait(0, 1)
    assert control.wait(1, 0) == pytest.approx(START), "what one request has found is not another's"


def test_what_is_waited_for_has_its_limits() -> None:
    control = Control(0.02, 8.0, [4, 7])
    for i in range(500):
        control.add(0, 4 + 3 * (i % 2), 0.0)
    assert control.wait(0, 4) == pytest.approx(8.0), "never more than the rule's own"
    control.add(1, 4, 0.03)
    assert control.wait(1, 4) == pytest.approx(START * math.exp(-GAIN - LAYER_GAIN))
    assert control.wait(1, 7) == pytest.approx(START * math.exp(-GAIN)), "what a case says is mostly its layer's"
    for i in range(500):
        control.add(1, 4 + 3 * (i % 2), 1.0)
    assert control.wait(1, 4) == pytest.approx(LEAST)
    control.forget(1)
    assert control.wait(1, 4) == pytest.approx(START)
    assert Control(0.02, 1.0, [0]).wait(0, 0) == 1.0


def test_a_step_waits_as_the_control_says(audited: World) -> None:
    audit = audits_of(audited.runtime)[0]
    audit.control._logs = {0: torch.tensor([0.5, 0.125]).log(), 1: torch.tensor([6.0, 1.5]).log()}
    running = audited.runtime.begin(Step.of((1, 0), (audited.lengths[1], audited.lengths[0]), (1, 1)))
    own = audit.floors.floor
    for layer, less, more in ((0, 1 / 2, 6.0), (1, 1 / 8, 1.5)):
        floors, waits = audit.floors.rows(layer, 2)
        torch.testing.assert_close(floors.exp(), torch.tensor([own, own * less]))
        torch.testing.assert_close(waits.exp(), torch.tensor([more, 1.0]))
    audited.runtime.abort(running)


@pytest.mark.parametrize("count", [16, 64, 256])
def test_the_interval_holds_the_mean_of_skewed_numbers(count: int) -> None:
    draws, inside, runs = random.Random(1), 0, 600
    truth = 2.718281828**0.5
    for _ in range(runs):
        mean = Mean()
        for _ in range(count):
            mean.add(draws.lognormvariate(0, 1))
        found = mean.interval()
        inside += found[0] <= truth <= found[1]
    assert inside / runs > {16: 0.9, 64: 0.93, 256: 0.94}[count]


def test_the_interval_of_the_missed_mass_holds_where_few_cases_make_up_half_of_it() -> None:
    """24 audits of which two in a hundred miss forty times what the others do: in most draws there is none."""
    draws, runs, inside, plain = random.Random(5), 400, 0, 0
    small, large, share = 0.01, 0.4, 0.02
    truth = (1 - share) * small + share * large
    for _ in range(runs):
        tally = Tally(0.02)
        for _ in range(24):
            missed = (large if draws.random() < share else small) * draws.uniform(0.8, 1.2)
            tally.add(missed / 4, missed, small)
        found, usual = tally.missed_interval(), tally.missed.interval()
        inside += found[0] <= truth <= found[1]
        plain += usual[0] <= truth <= usual[1]
    assert plain / runs < 0.6
    assert inside / runs > 0.95


def test_students_distribution() -> None:
    known = {7: 2.365, 15: 2.131, 30: 2.042, 120: 1.980}
    assert {df: student(df) for df in known} == pytest.approx(known, abs=2e-3)


def test_a_request_over_its_target_says_by_how_much() -> None:
    tally = Tally(0.02)
    for _ in range(9):
        tally.add(0.03, 0.1, 0.08)
    assert tally.summary()["over_target"] == 1.5
    assert tally.plus([tally]).summary()["audits"] == 18
    assert Tally(0.02).summary()["error"] is None


@pytest.mark.parametrize("where", ["note_case", "_measure", "_take", "_collect"])
def test_an_audit_that_fails_costs_no_step_anything(
    where: str, audited: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = audits_of(audited.runtime)[0]

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(audits if where == "note_case" else audit, where, fails)
        with pytest.raises(AssertionError, match="dropped"):
            audited.step(1, 1)
    assert audit.failed
    assert audit.report()["failed"] == audit.failed
    audit.failed, seen = 0, len(audited.seen)
    audited.step(1, 1)
    assert len(audited.seen) == seen + 2, "the next ones are measured again"


def test_a_thread_that_fails_is_asked_no_more(audited: World) -> None:
    audit, job = audits_of(audited.runtime)[0], Future[Finding]()
    job.set_exception(RuntimeError("no"))
    watched = audit.watched[0]
    watched.job = Job(Chosen(0, 0, 0, audited.lengths[0]), torch.zeros(1, dtype=torch.long), job)
    with pytest.raises(AssertionError, match="dropped"):
        audited.step(1, 1)
    assert watched.job is None
    audit.failed = 0
    audited.step(1, 1)


def test_a_step_that_is_tried_again_audits_the_same_cases(audited: World) -> None:
    audit, step = audits_of(audited.runtime)[0], Step.of((0, 1), tuple(audited.lengths), (1, 1))
    found = []
    for _ in range(3):
        running = audited.runtime.begin(step)
        found.append(audit._chosen)
        audited.runtime.abort(running)
    assert len(found[0]) == 2
    assert found[0] == found[1] == found[2]
