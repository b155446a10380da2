"""Parts of a model without its weights: its tokenizer, or the shapes of its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from coattn.hf.architectures import check_config
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


def load_shapes(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model `name`, as `load` takes it, on the meta device: no weight of it is read, or has to be there."""
    where: Path | str = Path(name)
    if not (Path(name) / "config.json").is_file():
        where = resolve(name)
    of = {}
    if isinstance(where, Path) and is_gguf(where):
        where, of = where.parent, {"gguf_file": where.name}
    try:
        with quiet():
            local = isinstance(where, Path) or not reachable(where)
            config = AutoConfig.from_pretrained(where, trust_remote_code=False, local_files_only=local, **of)
            check_config(config)
            with torch.device("meta"):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        raise explain(error, where, "config") from error
    return model.eval()
