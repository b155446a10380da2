"""The extension itself, its errors, and the checks that every call makes."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coattn.errors import CoattnError

try:
    extension: Any = importlib.import_module("coattn._native")
except ImportError as error:
    raise ImportError("coattn's C++ core is not built; install the package or run scripts/build_native.sh") from error


class NativeError(CoattnError, RuntimeError):
    """A refusal of the C++ core: `sentence` says what is wrong, `hint` what to do next."""


def check_sources(folder: Path, built: str | None) -> None:
    """Refuses an extension that was built from other sources than those in `folder`. A wheel has none: it has
    `source_hash.txt` beside the folder, of those that it was built from.

    built: the hash that `csrc/source_hash.cmake` made when it was built. Reads half a megabyte, in about 3 ms.
    """
    sources = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.*")}
    kept = [name for name in sorted(sources) if name.endswith((".cpp", ".h", ".inl"))]
    if not kept:
        stated = folder.with_name("source_hash.txt")
        if built is None or not stated.is_file() or stated.read_text().strip() != built:
            raise NativeError(
                f"coattn's C++ core is not the one of the wheel in {folder.parent.parent}.",
                "Install it again: pip install --force-reinstall --no-deps coattn.",
            )
        return
    lines = "".join(f"{hashlib.sha256(sources[name].read_bytes()).hexdigest()} {name}\n" for name in kept)
    if hashlib.sha256(lines.encode()).hexdigest() != built:
        raise NativeError(
            f"coattn's C++ core was built from other sources than those in {folder}.",
            "Build it again: make setup, or scripts/build_native.sh.",
        )


check_sources(Path(__file__).with_name("csrc"), getattr(extension, "source_hash", None))
extension.set_error_type(NativeError)

_ELEMENT_OF_DTYPE = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def element_of(dtype: torch.dtype) -> str:
    """The element type of a float tensor's dtype."""
    try:
        return _ELEMENT_OF_DTYPE[dtype]
    except KeyError:
        raise NativeError(f"The CPU kernels do not take {dtype}.", "Use float32, bfloat16 or float16.") from None


def elem(element: str) -> int:
    """The extension's number of an element type: `f32`, `bf16`, `f16`, `int8`; of blocks of values alone `int4` too."""
    if element not in extension.elems:
        raise NativeError(f"There is no element type {element!r}.", f"Use one of {', '.join(extension.elems)}.")
    return int(extension.elems[element])


def check(ok: bool, sentence: str, hint: str) -> None:
    """Raises NativeError unless `ok`."""
    if not ok:
        raise NativeError(sentence, hint)


def check_tensor(name: str, x: Tensor, shape: Sequence[int | None], dtype: torch.dtype | None = None) -> None:
    """`None` in `shape` matches any size; every dimension but the last may be strided unless `dtype` is given."""
    fits = x.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, x.shape, strict=False))
    wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    check(fits, f"{name} has shape {list(x.shape)} where {wanted} is needed.", "See the docstring for the shapes.")
    check(x.device.type == "cpu", f"{name} lies on {x.device}.", "The CPU kernels read CPU tensors.")
    if dtype is not None:
        check(x.dtype == dtype, f"{name} is {x.dtype} where {dtype} is needed.", f"Convert it: {name}.to({dtype}).")
        check(x.is_contiguous(), f"{name} is not contiguous.", f"Call {name}.contiguous().")
    else:
        element_of(x.dtype)
        check(
            x.shape[-1] == 1 or x.stride(-1) == 1,
            f"The last dimension of {name} is not contiguous.",
            f"Call {name}.contiguous().",
        )


def check_table_heads(heads: int, kv_heads: int) -> None:
    """Lists are for all heads together or for each KV head."""
    check(
        heads in (1, kv_heads),
        f"Lists for {heads} heads do not fit {kv_heads} KV heads.",
        "Give one list for all heads, or one for each KV head.",
    )
