"""vLLM's names for what means the same here, and what is said of names that nobody knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from coattn.errors import ConfigError, UnknownNameError

T = TypeVar("T", bound=Callable[..., Any])

ALIASES: Mapping[str, Mapping[str, str]] = {
    "LLM": {
        "max_model_len": "max_length",
        "max_num_seqs": "max_batch",
        "enable_prefix_caching": "reuse",
        "kv_cache_memory_bytes": "gpu_kv",
    },
    "SamplingParams": {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"},
    "LLM.generate": {"sampling_params": "params", "use_tqdm": "progress"},
    "LLM.chat": {"sampling_params": "params", "use_tqdm": "progress"},
}
"""By what takes them: vLLM's name -> ours."""
INSTEAD = {
    "gpu_memory_utilization": "Limit the KV cache in bytes: gpu_kv='20GiB'.",
    "cpu_offload_gb": "Give the share of the layers' weights that the GPU holds: weights_on_gpu=0.5.",
    "max_num_batched_tokens": "Give the prompt tokens of a step: chunk=2048.",
    "pipeline_parallel_size": "Name the devices: devices=['cuda:0', 'cuda:1'].",
    "tensor_parallel_size": "Layers can lie on several GPUs, each whole: devices=['cuda:0', 'cuda:1'].",
}
"""Names of vLLM's that have no equal here, and what comes closest."""


def takes_aliases(name: str) -> Callable[[T], T]:
    """For a method or a class: it also takes the names of `ALIASES[name]`. UnknownNameError blames it for names that
    neither it nor what it passes them on to has."""
    aliases = ALIASES[name]

    def decorate(target: T) -> T:
        inner = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        own = inspect.signature(inner).parameters
        names = [name for name, each in own.items() if each.kind is not each.VAR_KEYWORD]
        passes_on, known = len(names) < len(own), {*names[1:], *aliases}

        @wraps(inner)
        def run(*given: Any, **named: Any) -> Any:
            for alias in aliases.keys() & named.keys():
                if aliases[alias] in (*names[: len(given)], *named):
                    said = f"{name} got {alias} and {aliases[alias]}, which mean the same."
                    raise ConfigError(said, f"Leave out {alias}.")
                named[aliases[alias]] = named.pop(alias)
            try:
                if not passes_on and not named.keys() <= known:
                    raise UnknownNameError("", named.keys() - known, ())
                return inner(*given, **named)
            except UnknownNameError as error:
                owner = f"{name} with {error.owner}" if error.owner else name
                raise UnknownNameError(owner, error.names, {*known, *error.known}, INSTEAD) from None

        if not isinstance(target, type):
            return run  # type: ignore[return-value]
        target.__init__ = run  # type: ignore[misc]
        return target

    return decorate
