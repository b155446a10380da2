"""A model by its config alone: shapes without weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coattn.hf.architectures import check_config
from coattn.hf.hub import reachable
from coattn.hf.models import resolve
from coattn.hf.models.resolve import is_gguf
from coattn.hf.quiet import quiet
from coattn.hf.refusals import explain


def ghost(name: str, dtype: torch.dtype) -> PreTrainedModel:
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
