"""What this machine has, and what coattn does with it."""

from __future__ import annotations

import os
import platform
from typing import Any

from coattn.cache.available import memory
from coattn.provenance import cpu_name, package_version
from coattn.units import format_bytes

COMFORTABLE = 8 << 30
"""Free memory under which a hint is given: smaller ones hold few tokens beside a model."""


def examine() -> dict[str, Any]:
    """Facts (`machine`), choices with reasons (`uses`) and `hints`. Takes no memory."""
    import torch

    from coattn.hf.cpu_dtypes import is_slow

    features, native_problem = _features()
    total, available = memory()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    sets = [name for name, there in features.items() if there is True]
    machine = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": ", ".join(sets) or "generic",
        "memory": format_bytes(total),
        "memory_available": format_bytes(available),
        "gpu": ", ".join(f"cuda:{i} {gpu.name} ({format_bytes(gpu.total_memory)})" for i, gpu in enumerate(gpus))
        or None,
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "transformers")},
    }
    hints = [reason for i in range(len(gpus)) if (reason := _refused(i))]
    usable = [] if hints else gpus
    chosen = (_tiers(usable), _dtype(usable), _kernels(native_problem))
    uses = [dict(zip(("part", "choice", "reason"), use, strict=True)) for use in chosen]
    if not gpus:
        hints.append("No GPU was found: the GPU tier is ordinary memory with the same budget, and every method works.")
    if native_problem:
        hints.append("Build the native extension with `pip install .` and a C++ compiler.")
    if not gpus and is_slow(torch.bfloat16, torch.device("cpu")):
        hints.append("This CPU has no instructions for bfloat16: load models of your own in float32.")
    if available < COMFORTABLE:
        hints.append(f"Only {format_bytes(available)} of memory is free: long contexts in DRAM will not fit.")
    return {"machine": machine, "uses": uses, "hints": hints}


def _refused(index: int) -> str | None:
    """Why a GPU cannot be used, or None."""
    import torch

    from coattn.errors import ConfigError
    from coattn.kernels.card import check_card

    try:
        check_card(torch.device("cuda", index))
    except ConfigError as error:
        return f"{error.sentence} {error.hint}"
    return None


def _tiers(gpus: list[Any]) -> tuple[str, str, str]:
    if len(gpus) > 1:
        names = ",".join(f"cuda:{i}" for i in range(len(gpus)))
        return "GPU tier", f"cuda:0, {gpus[0].name}", f"the first GPU; --devices {names} puts layers on all of them"
    if gpus:
        return "GPU tier", f"cuda:0, {gpus[0].name}", "the only GPU"
    return "GPU tier", "ordinary memory", "there is no GPU to use; the budget and the results are the same"


def _dtype(gpus: list[Any]) -> tuple[str, str, str]:
    import torch

    from coattn.hf.load import choose_dtype

    choice = choose_dtype("auto", torch.device("cuda" if gpus else "cpu"))
    reason = "the fastest on a GPU"
    if not gpus:
        reason = "AMX is used" if choice is torch.bfloat16 else "without AMX, bfloat16 is no faster on a CPU"
    return "numbers", str(choice).removeprefix("torch."), reason


def _kernels(problem: str | None) -> tuple[str, str, str]:
    if problem:
        return "CPU attention", "PyTorch reference", problem
    from coattn import native

    chosen = native.isa()
    passed = [f"{name}: {reason}" for name, reason in native.isas().items() if reason]
    reason = "the best this machine runs" + (f" ({'; '.join(passed)})" if passed else "")
    return "CPU attention", f"C++ kernels, {chosen}, {native.default_threads()} threads", reason


def _features() -> tuple[dict[str, Any], str | None]:
    try:
        from coattn import _native
    except ImportError as error:
        return {}, f"the native extension is not there ({error})"
    return dict(_native.cpu_features()), None
