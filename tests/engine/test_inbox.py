"""Who has a request here, without an engine."""

import threading
import time

import pytest

from coattn.engine.handle import Handle
from coattn.engine.inbox import RequestInbox
from coattn.engine.request import Request
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import BusyError, EngineError


def handle(name: int, deadline: float | None = None) -> Handle:
    request = Request(name, [0], SamplingParams(), 10, deadline=deadline)
    return Handle(request, None, frozenset(), False, None, lambda: False, lambda *_: None)


def test_there_is_room_for_those_that_run_and_those_that_may_wait() -> None:
    callers = RequestInbox(2, 1)
    for name in range(3):
        assert callers.room == 3 - name
        callers.arrive(handle(name))
        callers.take()
    with pytest.raises(BusyError, match="1 requests wait"):
        callers.arrive(handle(3))
    del callers.live[1]
    callers.arrive(handle(4))
    assert (len(callers), callers.room) == (3, 0)
    assert RequestInbox(2, None).room is None


def test_who_comes_and_who_goes_is_told_once() -> None:
    callers, first, second = RequestInbox(4, None), handle(0), handle(1)
    callers.arrive(first)
    callers.arrive(second)
    callers.cancel(first)
    assert callers.live == {}
    assert [list(each) for each in callers.take()] == [[first, second], [first]]
    assert callers.live == {0: first, 1: second}
    assert [list(each) for each in callers.take()] == [[], []]


def test_deadlines_come_in_their_order_and_once() -> None:
    callers, now = RequestInbox(4, None), time.perf_counter()
    for name, deadline in enumerate((now - 1, None, now + 1000, now - 2)):
        callers.arrive(handle(name, deadline))
    assert list(callers.late()) == [], "nobody has been taken"
    callers.take()
    assert list(callers.late()) == [3, 0]
    assert list(callers.late()) == []


def test_whoever_waits_hears_of_a_request_and_of_the_end() -> None:
    callers = RequestInbox(4, None)
    assert not callers.wait(0.01)
    threading.Timer(0.05, callers.arrive, [handle(0)]).start()
    assert callers.wait(60)
    assert [each.id for each in callers.clear()] == [0]
    threading.Timer(0.05, callers.close).start()
    assert not callers.wait(60), "closed"
    assert not callers.close(), "twice"
    with pytest.raises(EngineError, match="closed"):
        callers.arrive(handle(1))
