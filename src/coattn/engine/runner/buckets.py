"""Which batch sizes are captured; a step runs in the next larger one, its other rows are padding."""

from __future__ import annotations


def capture_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8 up to 32 and of 16 beyond; ends with `most`."""
    sizes = [r for r in (1, 2, 4, 8, 16, 24, 32, *range(48, most, 16)) if r < most]
    return (*sizes, most)


def bucket_for(sizes: tuple[int, ...], count: int) -> int:
    """The smallest captured size that holds `count` sequences."""
    return next(r for r in sizes if r >= count)
