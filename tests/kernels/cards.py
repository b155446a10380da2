"""Cards that kernels are compiled for: there is no other way to test them without one."""

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from coattn.kernels.cuda import nvrtc

SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may have, by compute capability: A100, RTX 3090, 4090, H100, B200, RTX 5090."""
CARDS = tuple(SHARED)
REGISTERS = 1 << 16
"""That a multiprocessor has, of any of them: more threads than they suffice for cannot be started."""


class Usage(NamedTuple):
    """What a kernel takes: registers of a thread, bytes of its stack (where registers are spilled to), and bytes of
    shared memory that it declares."""

    registers: int
    stack: int
    shared: int


def usage(cubin: bytes) -> list[Usage]:
    """Of each kernel of a cubin, as the program says that Triton brings along."""
    found = importlib.util.find_spec("triton")
    assert found.origin is not None
    program = Path(found.origin).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [program, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return [Usage(*map(int, row)) for row in re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", said)]


def fits(source: str, constants: dict[str, Any], card: int, threads: int) -> bool:
    """Whether the kernels of a CUDA C++ source, started with so many threads, can run on a card."""
    kernels = usage(nvrtc.compile_cubin(source, constants, f"sm_{card}"))
    return bool(kernels) and all(k.registers * threads <= REGISTERS and k.shared <= SHARED[card] for k in kernels)
