import pytest

from coattn.errors import ConfigError
from coattn.units import format_apart, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (None, None),
        (4096, 4096),
        ("4096", 4096),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5k", 1536),
        ("1MB", 10**6),
        (1e9, 10**9),
        ("0", 0),
    ],
)
def test_sizes_are_read(text: object, count: int | None) -> None:
    assert parse_bytes(text) == count  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "two", "2XiB", "-1", -1, float("inf"), float("nan"), True, [1], "1e"])
def test_other_things_are_refused(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)  # type: ignore[arg-type]


def test_sizes_are_written() -> None:
    told = [format_bytes(n) for n in (0, 1023, 1024, 94371840, 3 << 40)]
    assert told == ["0 B", "1023 B", "1.0 KiB", "90.0 MiB", "3.0 TiB"]


@pytest.mark.parametrize(
    ("counts", "texts"),
    [
        ((3 << 20, 2 << 20), ("3.0 MiB", "2.0 MiB")),
        ((42_173_440, 42_131_456), ("40.22 MiB", "40.18 MiB")),
        (((40 << 20) + 1, 40 << 20), ("41,943,041 bytes", "41,943,040 bytes")),
        ((7, 7), ("7 B", "7 B")),
    ],
)
def test_two_sizes_that_differ_are_written_so(counts: tuple[int, int], texts: tuple[str, str]) -> None:
    assert format_apart(*counts) == texts
