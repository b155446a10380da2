"""`coattn methods --check`: a row of one's own beside full attention."""

import json
from pathlib import Path

import pytest

from coattn.cli.main import main
from coattn.parts.schedule.layer_ahead import LayerAhead

ROW = """
[method.mine]
cache = "tiered"
select = "everything"
executor = "cpu"
schedule = "{schedule}"
params = {{ window_blocks = 2, block = 8 }}
"""


def run(path: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["methods", str(path), "--check", *more])
    return int(caught.value.code or 0)


def test_an_exact_row_is_found_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.toml"
    path.write_text(ROW.format(schedule="same_layer"))
    assert run(path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] is True
    assert found["problems"] == []
    assert found["own"]["error"] < 2e-5
    assert run(path) == 0
    assert "No problem was found" in capsys.readouterr().out


def test_a_row_that_is_not_what_it_says_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerAhead, "is_exact", lambda self: True)
    path = tmp_path / "rows.toml"
    path.write_text(ROW.format(schedule="layer_ahead"))
    assert run(path) == 1
    assert "it says that it is exact" in capsys.readouterr().out


def test_check_needs_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["methods", "--check"])
    assert caught.value.code == 2
    assert "hint:" in capsys.readouterr().err
