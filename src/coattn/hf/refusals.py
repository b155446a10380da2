"""Calls into Transformers and the hub: silent, and what they raise as one sentence and a hint."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import huggingface_hub.utils
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from transformers.utils import logging

from coattn.errors import CoattnError, ModelError, one_line

hf_logging: Any = logging  # untyped upstream
hub_logging: Any = huggingface_hub.utils.logging

SECONDS = 10.0
"""To wait for the hub: its own client tries again for most of a minute."""
HINT = "Check the name and the network, or use a local folder; `coattn models` lists what coattn fetches by itself."

_REASONS = (
    (
        r"does not recognize this architecture|unrecognized model identifier",
        "This version of Transformers does not know the model type of {}.",
        "Upgrade transformers, or choose another model.",
    ),
    (
        r"unrecognized configuration class",
        "{} is not a causal language model.",
        "Choose a model that generates text.",
    ),
    (
        r"trust_remote_code|custom code",
        "{} needs code of its own to run, and coattn never runs code that ships with a model.",
        "Choose a model whose architecture is part of Transformers.",
    ),
    (
        r"(a|no) file named model\.safetensors",
        "{} has no weights in safetensors, the only form coattn opens.",
        "Choose a model that offers them, or save it as safetensors where you trust it.",
    ),
    (
        r"gated repo",
        "{} on the model hub asks for permission first.",
        "Ask for it there, then log in with `hf auth login`.",
    ),
)
"""What a foreign message says in lower case, the sentence about a model, and the hint."""


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing from Transformers reaches stdout or stderr inside. Process-wide while it lasts: keep it short.

    Some of its loops draw their bar on stderr without asking the library's own switch, hence the redirection.
    """
    bars = hf_logging.is_progress_bar_enabled()
    levels = [(log, log.get_verbosity()) for log in (hf_logging, hub_logging)]
    for log, _ in levels:
        log.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in levels:
            log.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


@contextmanager
def explained(where: Path | str, part: str) -> Iterator[None]:
    """Loads `part` of the model `where` inside this block, `quiet`ly; what goes wrong is one sentence and a hint."""
    try:
        with quiet():
            yield
    except Exception as error:
        raise explain(error, where, part) from error


def explain(error: Exception, where: Path | str, part: str) -> CoattnError:
    """The error to raise instead of `error`, met while loading `part` of `where`: a folder or a hub name."""
    if isinstance(error, CoattnError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return ModelError(f"The weights of {where} do not fit on the device.", "Use the CPU, or a smaller model.")
    said = str(error).lower()
    for mark, sentence, advice in _REASONS:
        if re.search(mark, said):
            return ModelError(sentence.format(where), advice)
    if isinstance(where, str) and ("couldn't connect" in said or "offline" in said or re.search(r"\bcached?\b", said)):
        return ModelError(f"The model hub cannot be reached, and {where} is not in its cache here.", HINT)
    return ModelError(
        f"The {part} of {where} cannot be loaded: {one_line(error)}.",
        "Check that its files are whole and belong together; copy or download them again.",
    )


def reachable(name: str) -> bool:
    """Whether the hub answers for model `name`; if not, only its cache here can serve.

    Raises ModelError when the hub answers that it has no such model. One request, at most `SECONDS`.
    """
    try:
        HfApi().model_info(name, timeout=SECONDS)
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no model folder {name} here and no public model {name} on the hub.", HINT
        ) from error
    except HfHubHTTPError as error:
        return error.response.status_code < 500  # it answers: let the download itself say what is wrong
    except (OfflineModeIsEnabled, OSError):
        return False
    except Exception as error:  # the client's transport library differs between its releases
        if "connect" in type(error).__name__.lower() or "timeout" in type(error).__name__.lower():
            return False
        raise
    return True


def refuse_gaps(name: str, missing: Sequence[str], misshapen: Sequence[str]) -> None:
    """Raises ModelError where tensors are missing in the files of a model, or have another shape than it needs."""
    for what, keys in (("lack", missing), ("have the wrong shape for", misshapen)):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(
                f"The weights of {name} {what} {min(keys)}{more}.",
                "The files do not belong together: download or save the model again.",
            )
