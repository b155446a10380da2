from pathlib import Path
from typing import Any

import pytest

from coattn.errors import CoattnError, ConfigError, MethodError
from coattn.method.row import compose
from coattn.method.table import METHODS, find_method

ROW = """
[method.short]
cache = "recent"
select = "everything"
executor = "gpu"
schedule = "inline"
summary = "A short window."

[method.short.params]
sinks = 4
recent = 60
"""


def write(folder: Path, text: str) -> str:
    path = folder / "rows.toml"
    path.write_text(text)
    return str(path)


def test_a_name_finds_its_row() -> None:
    assert find_method("cpu") is METHODS["cpu"]
    with pytest.raises(MethodError, match="no method 'cpuu'"):
        find_method("cpuu")


def test_a_file_with_one_row_is_a_method(tmp_path: Path) -> None:
    row = find_method(write(tmp_path, ROW))
    assert (row.name, row.executor, row.summary) == ("short", "gpu", "A short window.")
    assert compose(row).params["recent"] == 60


def test_one_of_several_rows_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, ROW + ROW.replace("short", "other"))
    assert find_method(f"{path}:other").name == "other"
    with pytest.raises(MethodError, match="several rows"):
        find_method(path)
    with pytest.raises(MethodError, match="no row 'third'"):
        find_method(f"{path}:third")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[method.a\n", MethodError, "cannot be read as TOML"),
        ("x = 1\n", ConfigError, "tables \\[method.NAME\\]"),
        ("method = 3\n", ConfigError, "tables \\[method.NAME\\]"),
        ("[method]\na = 1\n", ConfigError, "not a table"),
        ('[method.a]\ncache = "gpu"\nspeed = 3\n', ConfigError, "unknown key 'speed', missing key 'select'"),
        (ROW.replace('"gpu"', "7"), ConfigError, "not a name"),
        (ROW.replace('"gpu"', "[7]"), ConfigError, "not a name"),
        (ROW.replace('"inline"', "false"), ConfigError, "not a name"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, error: type[CoattnError], message: str) -> None:
    with pytest.raises(error, match=message):
        find_method(write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="There is no file"):
        find_method(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize("spec", [None, 3, ["full"]])
def test_what_is_no_name_is_refused(spec: Any) -> None:
    with pytest.raises(MethodError, match="a name or a row"):
        find_method(spec)
