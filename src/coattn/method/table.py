"""Finding a row: by its name, or in a TOML file that a user wrote."""

import tomllib
from pathlib import Path
from typing import Any

from coattn.errors import ConfigError, MethodError
from coattn.method.registry import METHODS as METHODS
from coattn.method.registry import registry
from coattn.parts.method import AXES, Method

SLIDING = Method(
    "sliding",
    cache="recent",
    select="everything",
    summary="Layers whose own attention is a sliding window: exact, bounded, always in GPU memory.",
    params={"sinks": 0},
)
"""Not in the table: the runtime uses it under every method for layers that look back a fixed number of tokens."""

_KEYS = {*AXES, "summary", "paper", "params"}


def find_method(spec: str | Method) -> Method:
    """A row by name, from a file (`rows.toml` with one row, or `rows.toml:name`), or the row itself."""
    if isinstance(spec, Method):
        return spec
    if not isinstance(spec, str):
        raise MethodError(f"A method is a name or a row, not {spec!r}.", f"Known methods: {', '.join(METHODS)}.")
    path, _, name = spec.partition(".toml:") if ".toml:" in spec else (spec, "", "")
    if spec.endswith(".toml") or name:
        rows = read_rows(Path(spec if not name else path + ".toml"))
        if not name and len(rows) == 1:
            return next(iter(rows.values()))
        if name in rows:
            return rows[name]
        where = f"{path}.toml" if name else spec
        raise MethodError(
            f"{where} has {'no row ' + repr(name) if name else 'several rows'}; its rows are: {', '.join(rows)}.",
            f"Name one: {where}:{next(iter(rows))}.",
        )
    if spec in METHODS:
        return METHODS[spec]
    known, _, settings = spec.partition(",")
    if known in METHODS:  # as rows of a table are named
        apart = " ".join(f"--set {setting}" for setting in settings.split(","))
        raise MethodError(
            f"{spec!r} is a method with parameters in one.",
            f"Give them apart: --method {known} {apart}; in Python as keywords.",
        )
    raise MethodError(
        " ".join([f"There is no method {spec!r}.", *map(str, registry().failures)]),
        f"Methods: {', '.join(METHODS)}; or a TOML file with a row of your own.",
    )


def read_rows(path: Path) -> dict[str, Method]:
    """The rows of a TOML file: tables `[method.NAME]` with cache, select and, if wanted, the other axes and params."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MethodError(f"There is no file {path}.", "Check the path of the method file.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MethodError(
            f"{path} cannot be read as TOML: {error}.", "See docs/add_a_method.md for an example."
        ) from None
    rows = data.get("method")
    if set(data) - {"method"} or not isinstance(rows, dict) or not rows:
        raise ConfigError(f"{path} must hold tables [method.NAME] and nothing else.", "See docs/add_a_method.md.")
    return {name: _row(path, name, row) for name, row in rows.items()}


def _row(path: Path, name: str, row: Any) -> Method:
    if not isinstance(row, dict):
        raise ConfigError(f"{path}: method.{name} is not a table.", f"Write [method.{name}] on a line of its own.")
    unknown, missing = sorted(set(row) - _KEYS), sorted({"cache", "select"} - set(row))
    if unknown or missing:
        problems = [f"unknown key {k!r}" for k in unknown] + [f"missing key {k!r}" for k in missing]
        raise ConfigError(f"{path}: [method.{name}] has {', '.join(problems)}.", f"Keys: {', '.join(sorted(_KEYS))}.")
    given = {key: value for key, value in row.items() if key != "params"}
    if not all(isinstance(text, str) for text in given.values()):
        raise ConfigError(f"{path}: [method.{name}] has a part that is not a name.", 'Write parts as "name".')
    if not isinstance(row.get("params", {}), dict):
        raise ConfigError(f"{path}: method.{name}.params is not a table.", f"Write [method.{name}.params].")
    return Method(name, params=row.get("params", {}), **given)
