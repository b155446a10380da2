"""A failure as a person should see it."""

from __future__ import annotations

import torch

from coattn.errors import CoattnError, EngineError


def explain(error: Exception) -> CoattnError:
    """The error itself where it was meant to be read; else one that says what happened."""
    if isinstance(error, CoattnError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError("The device ran out of memory in a step.", "Lower max_batch, chunk or gpu_kv.")
    said = " ".join(str(error).split())[:240] or type(error).__name__
    found = EngineError(f"The step failed: {said}.", "If it happens again, please report it with the full traceback.")
    found.__cause__ = error
    return found
