"""Runs several commands of coattn one after the other in one process, so that imports and kernels are paid for once.

Reads lines `NAME SECONDS WORD...` from standard input: a name for what is printed, what it may take, the command
without `coattn` or `coattn-lab`. A command that fails or takes too long ends alone; what it has written stays.
Usage: python lab/scripts/many.py SECONDS_IN_ALL < commands
"""

from __future__ import annotations

import contextlib
import gc
import io
import shlex
import signal
import sys
import time
from types import FrameType

import click

from coattn import provenance
from coattn.cli.main import cli
from coattn_lab.cli.groups import lab
from coattn_lab.cli.main import __all__ as _commands  # noqa: F401 - registers them


class LateError(Exception):
    """A command has taken all of its time."""


def _late(_signal: int, _frame: FrameType | None) -> None:
    raise LateError


def run(words: list[str], seconds: int) -> str:
    """One command -> how it ended."""
    provenance.arguments[:] = ["coattn", *words]
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(seconds)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            group = lab.commands.get(words[0])
            is_lab = isinstance(group, click.Group) and words[1] in group.commands
            (lab if is_lab else cli).main(words, standalone_mode=False)
    except LateError:
        return f"late after {seconds} s"
    except Exception as error:  # the others go on
        return f"failed: {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    return "done"


def main() -> None:
    """Every line, within what is left."""
    import torch

    ends, failed = time.monotonic() + float(sys.argv[1]), 0
    for line in sys.stdin:
        name, limit, *words = shlex.split(line, comments=True) or ("", "0")
        if not name:
            continue
        left = min(int(limit), int(ends - time.monotonic()))
        begun = time.monotonic()
        ended = run(words, left) if left > 2 else "no time left"
        failed += ended != "done"
        print(f"{name}: {ended}, {time.monotonic() - begun:.1f} s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
