"""Transformers newer than what was tested is used, and one sentence says so."""

import logging
from importlib import metadata
from pathlib import Path

import pytest

import coattn
from coattn.hf import NEWEST_TESTED, warn_if_newer

MAJOR, MINOR = NEWEST_TESTED
OLDER, NEWER = ("5.17.0", f"{MAJOR}.{MINOR}.9"), (f"{MAJOR}.{MINOR + 1}.0", f"{MAJOR + 1}.0.0.dev0")


@pytest.mark.parametrize(("version", "newer"), [*((v, False) for v in OLDER), *((v, True) for v in NEWER)])
def test_one_sentence_above_the_newest_tested(version: str, newer: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "coattn.hf"):
        assert warn_if_newer(version) is newer
    assert len(caplog.messages) == newer
    assert all(version in said and "newest that coattn was tested with" in said for said in caplog.messages)


def test_what_is_tested_is_written_down() -> None:
    page = Path(coattn.__file__).parents[2] / "docs" / "dependencies.md"
    tested = ".".join(map(str, NEWEST_TESTED))
    assert f"to {tested}." in page.read_text()
    assert metadata.version("transformers")


def test_a_user_finds_what_there_is() -> None:
    assert {"LLM", "attach", "compose", "__version__"} <= set(dir(coattn))
    assert all(hasattr(coattn, name) for name in dir(coattn))
    assert (Path(coattn.__file__).parent / "py.typed").is_file()
