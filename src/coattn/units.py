"""Bytes and folders as people write them."""

import math
import os
import re
from pathlib import Path

from coattn.errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}

LARGEST = 1 << 60
"""Sizes are smaller."""


def parse_bytes(value: int | float | str | None, name: str = "size") -> int | None:
    """`"2GiB"`, `"512 MiB"`, `1e9`, `4096` -> bytes; None stays None. Raises ConfigError otherwise."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{name} is {value!r}, which is not a number of bytes.", 'Write it like "2GiB" or 4096.')
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"{name} is {value!r}, which is not a number of bytes.", 'Write it like "2GiB" or 4096.')
        value = float(match[1]) * _UNITS[match[2].lower()]
    if isinstance(value, int):
        value = max(-LARGEST, min(value, LARGEST))  # larger ones are no floats
    value = float(value)
    if not math.isfinite(value) or value < 0:
        raise ConfigError(
            f"{name} is {value}, but a memory budget cannot be negative or infinite.", "Give a positive size."
        )
    if value >= LARGEST:
        raise ConfigError(f"{name} is {value:g} bytes, which no machine has.", 'Write it like "2GiB" or 4096.')
    return int(value)


_COUNTS = {"": 1, "k": 1000, "m": 1000**2, "ki": 1 << 10, "mi": 1 << 20}


def parse_count(value: int | str, name: str) -> int:
    """`"200k"`, `"1M"`, `"131072"`, `"131,072"` -> tokens. Raises ConfigError otherwise."""
    match = re.fullmatch(r"\s*([0-9][0-9,_]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(value))
    if match is None or match[2].lower() not in _COUNTS:
        raise ConfigError(f"{name} is {value!r}, which is not a number of tokens.", "Write it like 131072 or 200k.")
    found = int(float(match[1].replace(",", "").replace("_", "")) * _COUNTS[match[2].lower()])
    if not 1 <= found < 1 << 40:
        raise ConfigError(f"{name} is {value!r}, which no sequence has.", "Write it like 131072 or 200k.")
    return found


def format_bytes(count: int, digits: int = 1) -> str:
    """`94371840` -> `"90.0 MiB"`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.{digits}f} TiB"


def format_enough(count: int) -> str:
    """The same as an option takes it, rounded up: `16810224` -> `"16.1MiB"`."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size /= 1024 if unit != "GiB" else 1
    return f"{math.ceil(size * 10) / 10:g}{unit}"


def format_apart(one: int, other: int) -> tuple[str, str]:
    """Two sizes with as many digits as it takes to tell them apart, in bytes where three are not enough."""
    for digits in (1, 2, 3):
        texts = format_bytes(one, digits), format_bytes(other, digits)
        if one == other or texts[0] != texts[1]:
            return texts
    return f"{one:,} bytes", f"{other:,} bytes"


def parse_share(text: str | None, name: str) -> float | None:
    """`1/8` or `0.125` -> 0.125; None stays None. Raises ConfigError otherwise."""
    if text is None:
        return None
    above, slash, below = text.partition("/")
    try:
        value = float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value <= 1:
        raise ConfigError(
            f"{name} is {text!r}, which is no share.", "Give a number above 0 and at most 1, such as 1/8 or 0.125."
        )
    return value


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def as_folder(name: str, value: object) -> Path | None:
    """The path of a folder, or None where none is given. Raises ConfigError for what is no path."""
    if value is None or isinstance(value, str | os.PathLike):
        return None if value is None else Path(value)
    raise ConfigError(f"{name} is {value!r}, but must be the path of a folder.", f'Write it like {name}="folder".')
