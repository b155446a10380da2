"""vLLM's names for what means the same here, and what is said of names that nobody knows."""

from __future__ import annotations

import inspect
import re
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


def option_hint(text: str) -> str:
    """`gpu_kv='20GiB'` -> `--gpu-kv 20GiB`, in a hint."""

    def option(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')} {re.sub('[][ ]', '', found[2]).replace(chr(39), '')}"

    return re.sub(r"(\w+)=(\[.*?\]|'.*?'|\w[\w.]*\w)", option, text)


SAME_OPTIONS = {
    "--max-model-len": "--max-length",
    "--max-num-seqs": "--max-batch",
    "--kv-cache-memory-bytes": "--gpu-kv",
    "--served-model-name": "--name",
    "--no-enable-prefix-caching": "--no-reuse",
    "--disable-log-requests": "--no-access-log",
}
"""Options of vLLM's server -> ours."""
ALWAYS = ("--enable-prefix-caching", "--enable-chunked-prefill", "--enable-auto-tool-choice")
"""Options of vLLM's server for what ours does anyway."""
OPTIONS_INSTEAD = {
    "--api-key": "Put the key into a file, --api-key-file FILE, or into COATTN_API_KEY.",
    "--quantization": "Leave it out: how weights are quantised is read from the model's config.json.",
    "--load-format": "Leave it out: safetensors and GGUF files are told apart.",
    "--kv-cache-dtype": "Give it to the method: --method full --set gpu_dtype=int8.",
    "--chat-template": "Put it into the model's folder, as chat_template.jinja.",
    "--tool-call-parser": "Leave it out: the form of calls is seen in the model's chat template.",
    "--reasoning-parser": "Leave it out: the form of thoughts is seen in the model's chat template.",
    "--trust-remote-code": "coattn never runs code that comes with a model.",
    "--enforce-eager": "Leave it out; --no-warm-up starts sooner.",
    "--ssl-keyfile": "Put a proxy with TLS before the server.",
    **{f"--{name.replace('_', '-')}": option_hint(hint) for name, hint in INSTEAD.items()},
}
"""Options of vLLM's server that have no equal here, and what comes closest."""


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
