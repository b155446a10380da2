"""How much memory the machine can still give this process.

The system promises more than it has: an allocation succeeds, and the process is killed when it writes there. So large
allocations are checked here first.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from coattn.errors import BudgetError
from coattn.units import format_apart

UNCHECKED_BYTES = 64 << 20
"""Less is not checked: the check takes longer than most such allocations."""
VERSIONS = (
    ("", "", ("memory.max", "memory.current")),
    ("memory", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
)
"""Of control groups, 2 and 1: the name in /proc/self/cgroup, the folder, the files with the limit and the use."""


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """Total and available bytes: the machine's, or those of a control group (a container's) where it allows less."""
    try:
        lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        total, available = (int(lines[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError):
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, free in _groups(root):
        total, available = min(total, limit), min(available, max(0, free))
    return total, available


def require(nbytes: int, what: str, place: str) -> None:
    """Raises BudgetError when the machine cannot give `nbytes` more. place: where they would be, in words."""
    if nbytes < UNCHECKED_BYTES:
        return
    _, available = memory()
    if nbytes > available:
        needed, free = format_apart(nbytes, available)
        raise BudgetError(
            f"{what} needs {needed} of KV memory {place}, but only {free} is free on this machine.",
            "Shorten the context, lower the batch or the window, or free memory; a budget that is given is believed.",
        )


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and free bytes of each control group this process is in that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    named = {
        kinds: path.lstrip("/") for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") > 1)
    }
    for kind, folder, names in VERSIONS:
        if kind not in named:
            continue
        base = root / "sys/fs/cgroup" / folder
        group = base / named[kind]  # inside a container the path may be that outside: then only the base is there
        while group == base or base in group.parents:
            try:
                limit, used = (int((group / name).read_text()) for name in names)
                yield limit, limit - used + _reclaimable(group / "memory.stat")
            except (OSError, ValueError):  # not there, or "max"
                pass
            group = group.parent


def _reclaimable(stat: Path) -> int:
    """Bytes that a control group uses for files and gives back when asked."""
    try:
        numbers = dict(line.split(" ", 1) for line in stat.read_text().splitlines())
    except OSError:
        return 0
    kinds = ("inactive_file", "active_file")  # version 1 counts those of groups inside by another name
    return sum(int(numbers.get(f"total_{kind}", numbers.get(kind, 0))) for kind in kinds)
