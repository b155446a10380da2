"""A model's tokenizer and positions without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from coattn.hf.converted import Progress, silent
from coattn.hf.hub import reachable
from coattn.hf.models import resolve
from coattn.hf.models.resolve import is_gguf
from coattn.hf.quiet import quiet
from coattn.hf.refusals import explain


def load_tokenizer(name: str | Path, on_progress: Progress = silent) -> tuple[Any, int | None]:
    """The tokenizer of model `name`, and how many positions the model has; None: it does not say. Prints nothing."""
    where = resolve(name, on_progress=on_progress)
    part = "config"
    try:
        with quiet():
            if isinstance(where, Path) and is_gguf(where):
                from coattn.hf.gguf.file import open_gguf
                from coattn.hf.gguf.tokenizer import read_tokenizer

                header = open_gguf(where, on_progress).header
                part = "tokenizer"
                most = header.get(f"{header['general.architecture']}.context_length")
                return read_tokenizer(header, where), most
            shared = {
                "trust_remote_code": False,
                "local_files_only": isinstance(where, Path) or not reachable(where),
            }
            config = AutoConfig.from_pretrained(where, **shared)
            part = "tokenizer"
            tokenizer = AutoTokenizer.from_pretrained(where, config=config, **shared)
    except Exception as error:
        raise explain(error, where, part) from error
    found = getattr(config, "max_position_embeddings", None)
    return tokenizer, int(found) if found else None
