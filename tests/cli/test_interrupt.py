"""Ctrl-C ends a command with one word and exit code 130, also while it is still being imported."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from coattn.__main__ import main

PROGRAM = """
import os, signal, sys, time

name, *sys.argv[1:] = sys.argv[1:]

class Interrupts:  # whoever asks for this module is interrupted, and makes another error of it
    def find_spec(self, wanted, *_):
        if wanted == name:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            except BaseException:
                raise RecursionError

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
from coattn.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["coattn.cli.main", "coattn.method.table"])
def test_an_interrupt_during_the_imports(module: str) -> None:
    """Of the command line, and of what a command needs."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, module, "methods"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped.\n")


def test_the_installed_command_is_the_one_that_hears_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"]["coattn"] == f"{main.__module__}:{main.__name__}"


def test_threads_that_wait_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coattn.cli.main.main", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for given, spins in (({}, "10000"), ({"OMP_WAIT_POLICY": "active"}, None)):
        monkeypatch.setattr(os, "environ", given)
        main()
        assert given.get("GOMP_SPINCOUNT") == spins
