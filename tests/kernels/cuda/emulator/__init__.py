"""Kernels of `coattn/kernels/cuda` on a CPU, thread by thread: slow, and good for a few blocks."""

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coattn.kernels.cuda.nvrtc import FOLDER, _value

HERE = Path(__file__).parent
OWN = [
    *(
        "wide",
        "narrow",
        "pair",
        "multiply",
        "halves",
        "from_half",
        "multiply_bytes",
        "power",
        "higher",
        "shared_address",
    ),
    *(
        "copy16",
        "copies_end",
        "copies_wait",
        "multiply16",
        "numbers",
        "both_numbers",
        "turned",
        "stream",
        "prefetch",
        "add_product",
    ),
]
"""Functions that the emulator has in place of the GPU's instructions."""
SHARED = "alignas(16) static unsigned char shared[1 << 18];"
"""Of a block, as much as any kernel takes."""


def without(source: str, names: list[str]) -> str:
    """A source without the functions of these names."""
    for name in names:
        start = re.compile(rf"(?:template <[^>]*>\s*)?__device__ __forceinline__ [^;{{}}()]*\b{name}\([^{{;]*\{{")
        while found := start.search(source):
            depth, end = 1, found.end()
            while depth:
                depth += {"{": 1, "}": -1}.get(source[end], 0)
                end += 1
            source = source[: found.start()] + source[end:]
    return source


def parameters(source: str, kernel: str) -> list[str]:
    """The types of a kernel's parameters."""
    found = re.search(rf"\b{kernel}\(([^)]*)\)\s*\{{", source)
    assert found is not None, kernel
    return [re.sub(r"\b\w+$", "", x.replace("__restrict__", "").strip()).strip() for x in found[1].split(",")]


class Emulated:
    """Like `nvrtc.Module`: the kernels of a file with some constants, over tensors in host memory."""

    def __init__(self, file: str, defines: dict[str, Any], folder: Path) -> None:
        source = (FOLDER / file).read_text().replace('#include "half.cuh"', "")
        source = without(source, OWN).replace("extern __shared__ __align__(16) unsigned char shared[];", SHARED)
        kernels = re.findall(
            r'extern "C" __global__ void[^(]*(?:\([^)]*\)[^(]*?)?\b(\w+)\((?=const|float|int|u32)', source
        )
        calls = ""
        for kernel in kernels:
            types = parameters(source, kernel)
            given = ", ".join(f"*({kind}*)args[{i}]" for i, kind in enumerate(types))
            calls += (
                f'extern "C" void run_{kernel}(unsigned x, unsigned y, unsigned z, int threads, void** args) {{\n'
                f"  kernel_call = [=] {{ {kernel}({given}); }};\n  run_grid(x, y, z, threads);\n}}\n"
            )
        built = folder / f"{Path(file).stem}_{abs(hash(tuple(defines.items())))}"
        text = built.with_suffix(".cpp")
        text.write_text(f'#include "{HERE / "emulator.h"}"\n{source}\n{calls}')
        options = [f"-D{name}={value}" for name, value in defines.items()]
        subprocess.run(
            ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", *options, str(text), "-o", f"{built}.so"], check=True
        )
        self._library = ctypes.CDLL(f"{built}.so")

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, *args: Any, shared: int = 0, follow: bool = False
    ) -> None:
        """Runs a kernel to its end."""
        assert all(x.device.type == "cpu" for x in args if isinstance(x, Tensor))
        values = [_value(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        getattr(self._library, f"run_{name}")(*grid, threads, pointers)


_made: dict[Any, Emulated] = {}


def modules(folder: Path) -> Callable[[str, tuple[tuple[str, Any], ...], torch.device], Emulated]:
    """In place of `nvrtc.module`; a form is made once."""

    def module(file: str, defines: tuple[tuple[str, Any], ...], _: torch.device) -> Emulated:
        key = file, defines
        if key not in _made:
            _made[key] = Emulated(file, dict(defines), folder)
        return _made[key]

    return module
