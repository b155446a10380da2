"""CUDA C++ to running kernels: NVIDIA's run-time compiler, which PyTorch brings along, and the driver."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor

from coattn.folders import cache_dir

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
"""Sources, and the headers that they may include."""
Defines = tuple[tuple[str, Any], ...]
"""Constants of a source, by name."""
Form = tuple[str, Defines]
"""A file and its constants."""
DIGEST_BYTES = 32
"""In front of machine code that is kept: its SHA-256."""
MOST_THREADS = 16
"""That compile at a time."""
counts: Counter[str] = Counter()
"""Of this process: how often machine code was `compiled`, and `read` from the cache folder."""
_PROGRAMMATIC_SERIALIZATION = 6
"""The driver's number of the attribute by which a kernel may start before the one in front of it has ended."""


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, with a number for a value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Int64(int):
    """An argument that the kernel declares as `long long`."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiler, or None where there is none: of the CUDA that PyTorch was built for, if it was."""
    major = (torch.version.cuda or "").split(".")[0] or "*"
    homes = Path(torch.__file__).parent.parent / "nvidia"
    names = [f"libnvrtc.so.{number}" for number in ("13", "12") if major in (number, "*")]
    for name in (*names, "libnvrtc.so", *map(str, sorted(homes.glob(f"*/lib/libnvrtc.so.{major}")))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for a device: a GPU of compute capability 8 or more, and a compiler."""
    if device.type != "cuda" or torch.version.cuda is None or library() is None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def compile_cubin(source: str, defines: dict[str, Any], arch: str) -> bytes:
    """Machine code of `source` for `arch`, such as `sm_90`. Raises RuntimeError with the compiler's own words."""
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError("there is no libnvrtc")
    program = ctypes.c_void_p()
    headers = sorted(FOLDER.glob("*.cuh"))
    texts = (ctypes.c_char_p * len(headers))(*(path.read_bytes() for path in headers))
    names = (ctypes.c_char_p * len(headers))(*(path.name.encode() for path in headers))
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", len(headers), texts, names))
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    if failed:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        words = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, words)
        raise RuntimeError(words.value.decode())
    size = ctypes.c_size_t()
    _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    code = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


@cache
def _version() -> tuple[int, int]:
    """Of the compiler."""
    nvrtc, major, minor = library(), ctypes.c_int(), ctypes.c_int()
    if nvrtc is not None:
        _check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@cache
def cubin(file: str, defines: Defines, arch: str) -> bytes:
    """Machine code of a file beside this one, made once for each set of constants, kind of GPU and compiler.

    It is kept in coattn's cache folder. A file there that is damaged is made anew; where nothing can be written,
    nothing is kept.
    """
    source = (FOLDER / file).read_text()
    parts = (source, *(path.read_text() for path in sorted(FOLDER.glob("*.cuh"))), str(defines), str(_version()))
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = cache_dir() / "kernels" / arch / f"{Path(file).stem}-{name[:32]}.cubin"
    with suppress(OSError):
        kept = path.read_bytes()
        if hashlib.sha256(kept[DIGEST_BYTES:]).digest() == kept[:DIGEST_BYTES]:
            counts["read"] += 1
            return kept[DIGEST_BYTES:]
    code = compile_cubin(source, dict(defines), arch)
    counts["compiled"] += 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(hashlib.sha256(code).digest() + code)
        os.replace(part.name, path)  # others find all of it, or nothing
    except OSError as error:
        log.debug("compiled kernels are not kept: %s", error)
    return code


def arch_of(device: torch.device) -> str:
    """Of a GPU, as the compiler calls it."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def compile_all(forms: Iterable[Form], arch: str) -> None:
    """Machine code of these, side by side: each takes a processor a second."""
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda form: cubin(*form, arch), forms))


class Module:
    """The kernels of a file with some constants, loaded on one device. Lives as long as the process."""

    def __init__(self, file: str, defines: Defines, device: torch.device) -> None:
        code = cubin(file, defines, arch_of(device))
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        torch.cuda.current_stream(device)  # the context of PyTorch is current from here on
        with torch.cuda.device(device):
            torch.empty(1, device=device)
            _check(self._driver.cuModuleLoadData(ctypes.byref(self._module), code))
        self._kernels: dict[str, ctypes.c_void_p] = {}

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, *args: Any, shared: int = 0, follow: bool = False
    ) -> None:
        """Starts a kernel on the current stream. Tensors go as pointers, int as int32, float as float32.

        follow: it may start before the kernel in front has ended, and waits for that one by itself.
        """
        values = [_value(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        early = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, 1)
        config = _Config(*grid, threads, 1, 1, shared, stream, ctypes.pointer(early), int(follow))
        _check(self._driver.cuLaunchKernelEx(ctypes.byref(config), self._kernel(name, shared), pointers, None))

    def _kernel(self, name: str, shared: int) -> ctypes.c_void_p:
        if name not in self._kernels:
            kernel = ctypes.c_void_p()
            _check(self._driver.cuModuleGetFunction(ctypes.byref(kernel), self._module, name.encode()))
            if shared > 48 << 10:
                most_dynamic_shared = 8
                _check(self._driver.cuFuncSetAttribute(kernel, most_dynamic_shared, shared))
            self._kernels[name] = kernel
        return self._kernels[name]


@cache
def module(file: str, defines: Defines, device: torch.device) -> Module:
    """The kernels of a file beside this one, loaded once for each set of constants."""
    return Module(file, defines, device)


def _value(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, Int64):
        return ctypes.c_longlong(arg)
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    return ctypes.c_void_p(None) if arg is None else ctypes.c_int(arg)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver or compiler answered with error {code}")
