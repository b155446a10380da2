"""The tokenizer of a model by name, without its weights: prompts are made on machines that have no room for these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from coattn.hf.converted import Progress
from coattn.hf.gguf.header import open_gguf
from coattn.hf.gguf.tokenizer import read_tokenizer
from coattn.hf.load import hub_options
from coattn.hf.models import resolve
from coattn.hf.models.resolve import is_gguf
from coattn.hf.refusals import explained


def load_tokenizer(name: str, on_progress: Progress) -> tuple[Any, int | None]:
    """The tokenizer of model `name`, and how many positions the model has; None: it does not say. Prints nothing."""
    where = resolve(name, on_progress=on_progress)
    with explained(where, "tokenizer"):
        if isinstance(where, Path) and is_gguf(where):
            header = open_gguf(where, on_progress).header
            return read_tokenizer(header, where), header.get(f"{header['general.architecture']}.context_length")
        options = hub_options(where)
        config = AutoConfig.from_pretrained(where, **options)
        tokenizer = AutoTokenizer.from_pretrained(where, config=config, **options)
    return tokenizer, getattr(config, "max_position_embeddings", None)
