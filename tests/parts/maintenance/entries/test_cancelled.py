"""A turn that is cancelled while entries are chosen for it: at every stage of the choice, the session goes on as if the
choice had never begun, or as if the turn had never been."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.engine.small import check_tables, greedy, llm, prompt

import coattn
from coattn.engine.handle import Handle
from coattn.engine.session import Session
from coattn.errors import BudgetError
from coattn.parts.maintenance.entries import choosing as module
from coattn.parts.maintenance.entries import lists as lists_module
from coattn.parts.maintenance.entries.choosing import Choice
from coattn.parts.maintenance.entries.lists import EntryLists

FIRST, CANCELLED = prompt(203, seed=1), prompt(45, seed=2)
BACK = prompt(5, seed=3)
"""So few that blocks which had left the window for the cancelled turn are in it again."""
ONWARD = prompt(70, seed=4)
"""More than what is chosen by, so that nothing hangs on the queries of the turn before."""
LAYERS, HEADS = 2, 2
STAGES = {
    "due": None,
    "weighing": ("weigh_host", 0),
    "weighing the second layer": ("weigh_host", 1),
    "copying the first head": ("fill", 0),
    "copying in the middle of a head": ("fill", 3),
    "copying the last head": ("fill", -1),
    "weighing the window": ("weigh_window", 0),
    "over": ("over", 0),
}


class Gate:
    """Stops a choice at a stage until it is given up or waited for, which is what whoever ends it does first."""

    def __init__(self, patch: pytest.MonkeyPatch, stage: str) -> None:
        self.reached, self._stage, self._choice, self._calls = threading.Event(), STAGES[stage], None, 0
        self._heads: set[tuple[int, int]] = set()
        patch.setattr(lists_module, "CHUNK_BYTES", 1)
        host, window, fill, run = module.weigh_host, module.weigh_window, EntryLists.fill, Choice.run

        def weigh_host(choice: Choice, layer: int) -> torch.Tensor:
            self._pass("weigh_host", layer)
            return host(choice, layer)

        def weigh_window(*given: Any) -> Any:
            self._pass("weigh_window", given[1])
            return window(*given)

        def one_block(lists: EntryLists, layer: int, slot: int, head: int, *given: Any) -> int:
            """Of a call that would go on by itself, one block at a time."""
            last = (layer, head) == (LAYERS - 1, HEADS - 1)
            self._pass("fill", -1 if last else self._calls)
            self._calls += 1
            position, weight, *rest = given
            return fill(lists, layer, slot, head, position[: lists.block], weight[: lists.block], *rest)

        def chooses(choice: Choice) -> None:
            self._choice = choice
            run(choice)
            self._pass("over", 0)

        patch.setattr(module, "weigh_host", weigh_host)
        patch.setattr(module, "weigh_window", weigh_window)
        patch.setattr(EntryLists, "fill", one_block)
        patch.setattr(Choice, "run", chooses)

    def _pass(self, what: str, number: int) -> None:
        if (what, number) != self._stage or self._choice is None or self.reached.is_set():
            return
        self.reached.set()
        while what != "over" and not (self._choice.given_up or self._choice.waited_for):
            threading.Event().wait(1e-3)


@contextmanager
def engine(**options: Any) -> Iterator[coattn.LLM]:
    given = {"window_blocks": 16, "max_batch": 3, "max_length": 400, "beta": 2.0, **options}
    with llm("hgca", **given) as made:
        yield made


Found = tuple[tuple[int, ...], int, dict[str, torch.Tensor]]


def ask(session: Session, ids: list[int]) -> Found:
    """The answer, what was not read for it, and what the window's entries weigh after it."""
    out = session.submit_whole(ids, greedy(24, ignore_eos=True)).result()
    parked = session.llm.store.parked.get(("session", session.number))
    found = {name: x for name, x in parked.groups[0].tensors.items() if name.startswith("averages")}
    assert len(found) == LAYERS
    return out.token_ids, out.cached_tokens, found


def turn_up_to(made: coattn.LLM, session: Session, stage: str, patch: pytest.MonkeyPatch, end: Any) -> Handle:
    """A turn that ends at a stage of its choice, by `end(handle)`, while another sequence decodes, so that the thread
    chooses."""
    other = made.submit(prompt(30, seed=9), greedy(200, ignore_eos=True))
    while len(other.request.output) < 2:
        made.step()
    with patch.context() as inside:
        gate = Gate(inside, stage)
        handle = session.submit(CANCELLED, greedy(24, ignore_eos=True))
        while not handle.request.output:
            made.step()
        if STAGES[stage] is not None:
            made.step()
            assert gate.reached.wait(60), "the choice has got there"
        assert len(handle.request.output) == 1
        assert made.runner.runtime.busy() or stage == "over"
        end(handle)
        assert not made.runner.runtime.busy()
    other.cancel()
    return handle


def turn_and_cancel(made: coattn.LLM, session: Session, stage: str, patch: pytest.MonkeyPatch) -> None:
    turn_up_to(made, session, stage, patch, Handle.cancel)


@pytest.fixture(scope="module")
def back() -> Found:
    """A session's second turn."""
    with engine() as made:
        session = made.session()
        ask(session, FIRST)
        return ask(session, session.tokens + BACK)


def goes_back(session: Session, before: list[int], back: Found) -> None:
    """It answers as if there had been one turn before."""
    answer, cached, weights = ask(session, before + BACK)
    assert (answer, cached) == back[:2]
    for name, want in back[2].items():
        assert torch.equal(weights[name], want), name


@pytest.fixture(scope="module")
def onward() -> Found:
    """That of one whose turn was the cancelled one and what came after it, at once."""
    with engine() as made:
        session, other = made.session(), made.session()
        for each in (session, other):
            ask(each, FIRST)
        (first,) = other.submit(CANCELLED, greedy(1, ignore_eos=True)).result().token_ids
        return ask(session, [*session.tokens, *CANCELLED, first, *ONWARD])


@pytest.mark.parametrize("stage", STAGES)
def test_a_session_that_goes_back_answers_as_if_the_turn_had_never_been(
    stage: str, back: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine() as made:
        session = made.session()
        ask(session, FIRST)
        before = session.tokens
        turn_and_cancel(made, session, stage, monkeypatch)
        goes_back(session, before, back)
        check_tables(made)
        session.close()
        made.generate(prompt(20, seed=5), greedy(2))
        assert dict(made.runner.runtime.free_bytes()) == made.engine.scheduler.admission.capacity


@pytest.mark.parametrize("stage", STAGES)
def test_a_session_that_goes_on_answers_as_if_both_turns_were_one(
    stage: str, onward: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read counts, the choice does not: whatever it had found, and whoever was in the slot before."""
    with engine() as made:
        session = made.session()
        ask(session, FIRST)
        made.generate([prompt(180, seed=n) for n in (6, 7, 8)], greedy(30, ignore_eos=True))
        turn_and_cancel(made, session, stage, monkeypatch)
        answer, cached, weights = ask(session, session.tokens + ONWARD)
        assert cached == onward[1] + len(CANCELLED) + 1, "what was read is not read again"
        assert answer == onward[0]
        for name, want in onward[2].items():
            torch.testing.assert_close(weights[name], want, msg=name)


def test_a_turn_that_fails_while_it_is_chosen_for_changes_nothing(back: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> torch.Tensor:
        raise BudgetError("There is no room.", "Make some.")

    with engine() as made:
        session = made.session()
        ask(session, FIRST)
        before = session.tokens
        with monkeypatch.context() as patch:
            patch.setattr(module, "weigh_host", refuses)
            assert session.ask(CANCELLED, greedy(24, ignore_eos=True)).finish_reason == "error"
        assert session.tokens == before
        goes_back(session, before, back)


def test_a_turn_that_loses_its_slot_goes_on_whatever_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for stage in ("due", "weighing the second layer", "copying in the middle of a head", "over"):
        with engine() as made:
            session = made.session()
            ask(session, FIRST)
            scheduler = made.engine.scheduler
            handle = turn_up_to(made, session, stage, monkeypatch, lambda _, it=scheduler: it.preempt())
            found.append(handle.result().token_ids)
            assert handle.request.preemptions == 1
            check_tables(made)
    assert found == [found[0]] * len(found)
