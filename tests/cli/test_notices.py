"""What the library has to say stands on lines of its own on stderr, never inside an answer."""

import contextlib
import logging

import pytest

from coattn.cli.output import notices

log = logging.getLogger("coattn")


def test_a_notice_waits_for_the_end_of_the_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with notices() as answer:
        log.warning("Before %s.", "it")
        assert capfd.readouterr().err == "warning: Before it.\n"
        answer.write("Once upon")
        log.warning("Within it.")
        answer.write(" a time")
        assert capfd.readouterr() == ("Once upon a time", "")
        answer.end()
        assert capfd.readouterr() == ("", "warning: Within it.\n")
    handlers = list(log.handlers)
    with contextlib.suppress(RuntimeError), notices() as answer:
        answer.write("Once")
        log.error("It failed.")
        raise RuntimeError
    assert capfd.readouterr() == ("Once\n", "error: It failed.\n")
    assert log.handlers == handlers
