"""Ctrl-C ends a command with one word and exit code 130, also while it is still being imported."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from coattn.__main__ import main


class Interrupted:
    """An importer: whoever asks for the command line is interrupted."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "coattn.cli.main":
            raise KeyboardInterrupt


def test_an_interrupt_during_the_imports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "coattn.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "stopped.\n")


def test_the_installed_command_is_the_one_that_hears_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"]["coattn"] == f"{main.__module__}:{main.__name__}"
