"""Where a result comes from: versions, hardware, command, commit."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from coattn import source
from coattn._version import __version__

arguments: list[str] = ["coattn", *sys.argv[1:]]
"""The command line; `cli.main` sets it where it is called by a program."""


def command_line() -> str:
    """The command as it was typed, files by name alone: where they lie on somebody's machine is nobody else's
    business."""
    return " ".join(Path(a).name if a.startswith("/") else a for a in arguments)


def provenance() -> dict[str, Any]:
    """What a reader needs to judge or repeat a result."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "versions": {"coattn": __version__, "python": platform.python_version()}
        | {name: package_version(name) for name in ("torch", "transformers")},
        "hardware": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "gpu": gpu},
        "command": command_line(),
        "commit": source.commit(),
        "tree": source.tree(),
    }


def cpu_name() -> str:
    """The processor, as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def package_version(name: str) -> str | None:
    """The installed version; None where the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
