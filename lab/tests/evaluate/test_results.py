"""Files of results: how they are written, and which may be published."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coattn_lab.evaluate.results import fault, write_json

SHA = "0123456789abcdef0123456789abcdef01234567"
CLEAN = {"commit": SHA, "tree": "aa"}


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (CLEAN, None),
        ({**CLEAN, "complete": True, "resumed": [CLEAN]}, None),
        ({"tree": "aa"}, "names no commit"),
        ({**CLEAN, "commit": f"{SHA}-dirty"}, "not a clean one"),
        ({"commit": SHA}, "no hash"),
        ({**CLEAN, "unfinished": True}, "not finished"),
        ({**CLEAN, "complete": False}, "not finished"),
        ({**CLEAN, "resumed": [{**CLEAN, "commit": None}]}, "names no commit"),
    ],
)
def test_what_may_be_published(result: dict[str, object], why: str | None) -> None:
    found = fault(result)
    assert (found is None) if why is None else (found is not None and why in found)


def test_a_pipe_is_written_to_and_a_link_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_json(tmp_path / "pipe", {"a": 1})
    assert json.loads(os.read(reading, 100)) == {"a": 1}
    os.close(reading)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_json(tmp_path / "link", {"a": 2})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text()) == {"a": 2}
