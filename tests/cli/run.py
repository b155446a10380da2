"""The command line in this process: what it prints where, and how it ends."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

from coattn.cli.main import main


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def coattn(*arguments: str, stdin: str = "") -> Done:
    """`coattn ARGUMENTS` with standard input from a pipe."""
    return run(main, arguments, stdin)


def run(main: Callable[[list[str]], None], arguments: Sequence[str], stdin: str = "") -> Done:
    """A command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    pipe = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    with redirect_stdout(out), redirect_stderr(err), mock.patch("sys.stdin", pipe):
        try:
            main(list(arguments))
            code = 0
        except SystemExit as exit:
            code = int(exit.code or 0)
    return Done(code, out.getvalue(), err.getvalue())
