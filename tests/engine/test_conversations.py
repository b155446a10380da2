"""Sessions that are opened and closed by several threads at once."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from coattn.engine import conversations
from coattn.engine.conversations import Conversations
from coattn.engine.session import Session
from coattn.errors import BusyError


def engine() -> Any:
    """What sessions ask of an engine, without one."""
    opened = Conversations()
    return SimpleNamespace(
        conversations=opened,
        sessions=SimpleNamespace(path=lambda _: None, has=lambda _: False),
        store=SimpleNamespace(open=lambda _: None, close=lambda _: None),
        engine=SimpleNamespace(paused=nullcontext),
    )


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """At most so many have names."""
    monkeypatch.setattr(conversations, "MAX_NAMED_SESSIONS", 8)
    return 8


class Answering:
    """A turn that is not done; while somebody looks, another thread closes a session."""

    def __init__(self, session: Session) -> None:
        self.closing = threading.Thread(target=session.close, daemon=True)

    @property
    def done(self) -> bool:
        if self.closing.ident is None:
            self.closing.start()
            self.closing.join(0.2)
        return False


def test_a_session_may_be_closed_while_room_is_made_for_another(few: int) -> None:
    llm = engine()
    opened = [llm.conversations.open(llm, str(i), b"", True) for i in range(few)]
    turn = Answering(opened[2])
    opened[0]._turn = turn, [], ""
    more = llm.conversations.open(llm, "more", b"", True)
    turn.closing.join(10)
    assert not turn.closing.is_alive()
    assert [session.closed for session in opened] == [False, True, True, *[False] * 5]
    assert list(llm.conversations._named.values()) == [opened[0], *opened[3:], more]


def test_closing_waits_for_nobody_who_makes_room(few: int) -> None:
    """One thread closes a session just when another one closes it to make room."""
    llm = engine()
    first = llm.conversations.open(llm, "first", b"", True)
    for i in range(1, few):
        llm.conversations.open(llm, str(i), b"", True)
    inside, go_on = threading.Event(), threading.Event()

    def close(_: Any) -> None:
        if not inside.is_set():
            inside.set()
            go_on.wait(10)

    llm.store.close = close
    one = threading.Thread(target=first.close, daemon=True)
    other = threading.Thread(target=llm.conversations.open, args=(llm, "more", b"", True), daemon=True)
    one.start()
    assert inside.wait(10)
    other.start()
    other.join(0.3)  # by now it waits for the session that is being closed
    go_on.set()
    for thread in (one, other):
        thread.join(10)
        assert not thread.is_alive()
    assert first.closed
    assert first not in llm.conversations._named.values()


def test_where_all_answer_nobody_is_closed(few: int) -> None:
    llm = engine()
    opened = [llm.conversations.open(llm, str(i), b"", True) for i in range(few)]
    for session in opened:
        session._turn = SimpleNamespace(done=False), [], ""
    with pytest.raises(BusyError):
        llm.conversations.open(llm, "more", b"", True)
    opened[5]._turn = None
    more = llm.conversations.open(llm, "more", b"", True)
    assert isinstance(more, Session)
    assert [session.closed for session in opened].index(True) == 5
