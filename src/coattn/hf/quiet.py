"""Silence for calls into Transformers: no bars, no log lines, no warnings; as before afterwards."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import huggingface_hub.utils
from transformers.utils import logging

hf_logging: Any = logging  # untyped upstream
hub_logging: Any = huggingface_hub.utils.logging


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
