"""One line on stderr, on a terminal alone, says what is loaded, how much of a prompt is read, and what is written."""

import logging
import os
import pty
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from tests.engine.small import greedy, llm, prompt, small, tokenizer

from coattn import LLM
from coattn.engine import watch
from coattn.progress import Show, silent


@contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """stderr is a terminal -> what has been written since the last look."""
    main, other = pty.openpty()
    with open(other, "w") as stream, mock.patch.dict(os.environ, TERM="xterm"), mock.patch("sys.stderr", stream):

        def seen() -> str:
            stream.flush()
            text = ""
            while select.select([main], [], [], 0)[0]:
                text += os.read(main, 1 << 16).decode()
            return text

        yield seen
    os.close(main)


def test_a_line_on_a_terminal(tmp_path: Path) -> None:
    small().cpu().save_pretrained(tmp_path / "mine")
    tokenizer().save_pretrained(tmp_path / "mine")
    with terminal() as seen:
        with LLM(str(tmp_path / "mine"), "full", max_length=256, device="cpu") as engine:
            assert "mine: load" in seen()
            engine.generate([prompt(90), prompt(5)], greedy(40, ignore_eos=True))
            text = seen()
            assert "reading" in text
            assert "of 95 tokens, 0 of 2 answers" in text
            engine.generate(prompt(4), greedy(3), progress=False)
            assert seen() == ""
        with LLM(str(tmp_path / "mine"), "full", max_length=256, device="cpu", progress=False) as engine:
            engine.generate(prompt(90), greedy(3))
            assert seen() == ""


def test_nothing_where_stderr_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with llm() as engine:
        engine.generate([prompt(40), prompt(5)], greedy(3), progress=True)
        assert engine.engine.flush_outputs.__name__ == "nothing_to_wait_for"
    assert capfd.readouterr() == ("", "")


def test_a_prompt_that_is_read_at_once_moves_with_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, float, float | None]] = []

    @contextmanager
    def line(wanted: bool) -> Iterator[Show]:
        yield (lambda what, done, total, detail="": shown.append((what, done, total))) if wanted else silent

    monkeypatch.setattr(watch, "progress_line", line)
    monkeypatch.setattr(watch, "PAUSE", 1e-9)
    for chunk, marks in ((128, [0, 50]), (60, [0, 30, 60, 80])):
        shown.clear()
        with LLM((small(), tokenizer()), "full", max_length=256, chunk=chunk) as engine:
            handle = engine.submit(prompt(100), greedy(4, ignore_eos=True))
            answer = "".join(part.text for part in watch.stream(engine.engine, handle, True))
            assert engine.engine.part_read == 0
            assert answer == engine.generate(prompt(100), greedy(4, ignore_eos=True), progress=False)[0].text
        reading = [done for what, done, total in shown if (what, total) == ("reading", 100)]
        assert sorted(set(reading)) == marks
        assert reading == sorted(reading)
        assert ("writing", 4, 4) in shown


def test_the_library_speaks_through_its_logger(capfd: pytest.CaptureFixture[str]) -> None:
    """With a handler of the program's own on "coattn", nothing else comes to stderr."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("coattn").addHandler(handler)
    try:
        with LLM((small(), tokenizer()), "hcattention", max_length=64, block=8, window_blocks=1) as engine:
            engine.generate(prompt(40), greedy(2))
    finally:
        logging.getLogger("coattn").removeHandler(handler)
    assert any("No codebook was given" in record.getMessage() for record in records)
    assert capfd.readouterr() == ("", "")
