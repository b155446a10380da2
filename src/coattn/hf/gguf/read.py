"""A GGUF file as a model, whose weights may stay packed: then it needs the file's own bytes of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from coattn.hf.gguf.blocks import READERS, numbers, packed
from coattn.hf.gguf.header import GgufFile, Stored, read_header, read_tensors
from coattn.hf.quantised.module import PackedEmbedding, PackedLinear, PackedModule
from coattn.hf.quantised.read import skeleton
from coattn.hf.refusals import explained, refuse_gaps
from coattn.hf.stored import stored

INTERLEAVED = ("llama", "mistral")
"""Architectures whose queries and keys have the halves of each head in turns."""
LESS_ONE = ("gemma2", "gemma3")
"""Architectures whose norms are stored greater by one."""


class GgufCheckpoint:
    """The model that a file makes. It has no memory until `fill`: of the file only the header is read.

    Matrices and the embedding are packed where they are stored in one of `READERS`.
    """

    def __init__(self, file: GgufFile, config: Any, dtype: torch.dtype, keep: bool = True) -> None:
        """keep: else all weights become numbers of this dtype. Raises ModelError where tensors are missing or do not
        fit."""
        self.path, self.config = file.path, config
        self.kind: str = file.header["general.architecture"]
        self.model = skeleton(config, dtype)
        self._tensors = read_tensors(file.path)
        names = names_of(self.kind, config.num_hidden_layers)
        self._packed: dict[str, Stored] = {}
        """By path of a module."""
        self._plain: dict[str, Stored] = {}
        """By path of a parameter."""
        self._orders: dict[str, int] = {}
        """By path of either, the heads whose halves lie in turns."""
        missing, misshapen = [], []
        for path, tensor in list(stored(self.model)):
            owner, _, name = path.rpartition(".")
            own = f"{names.get_name(owner)}.{name}"
            module, found = self.model.get_submodule(owner), self._tensors.get(own)
            if found is None:
                missing.append(path)
                continue
            if found.shape != tensor.shape:
                misshapen.append(path)
                continue
            is_packed = (
                keep and found.kind in READERS and name == "weight" and isinstance(module, nn.Linear | nn.Embedding)
            )
            if is_packed:
                self._packed[owner] = found
                self._replace(owner, module, dtype)
            else:
                self._plain[path] = found
            if self.kind in INTERLEAVED and ".attn_" in own and own.split(".")[2] in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if ".attn_q." in own else config.num_key_value_heads
                self._orders[owner if is_packed else path] = heads
        refuse_gaps(file.name, missing, misshapen)

    @torch.no_grad()
    def fill(self, device: torch.device) -> PreTrainedModel:
        """The model with its weights on a device, where its layers are packed one after the other."""
        data = torch.from_file(str(self.path), size=self.path.stat().st_size, dtype=torch.uint8)

        def read(found: Stored) -> Tensor:
            return data[found.start : found.start + found.size].to(device, copy=True)

        for owner, found in self._packed.items():
            module = self.model.get_submodule(owner)
            assert isinstance(module, PackedModule)
            weight, order = packed(found.kind, read(found), found.shape[0]), self._order(owner, found, device)
            module.fill(weight if order is None else weight.take(order))
        for path, found in self._plain.items():
            owner, _, name = path.rpartition(".")
            value, order = numbers(found.kind, read(found), found.shape), self._order(path, found, device)
            value = value if order is None else value[order]
            value = value - 1 if self.kind in LESS_ONE and path.endswith("norm.weight") else value
            made = nn.Parameter(value.to(self.model.get_parameter(path).dtype), requires_grad=False)
            setattr(self.model.get_submodule(owner), name, made)
        table = self.model.get_input_embeddings()
        if not isinstance(table, PackedEmbedding):
            self.model.tie_weights()
        elif self.config.tie_word_embeddings:
            table.share(self.model.get_output_embeddings())
        self.model.to(device)
        return self.model

    def _replace(self, owner: str, module: nn.Linear | nn.Embedding, dtype: torch.dtype) -> None:
        """With a packed module without memory; a head that is tied to the embedding, too."""
        found = self._packed[owner]
        weight = packed(found.kind, torch.empty(found.size, dtype=torch.uint8, device="meta"), found.shape[0])
        if isinstance(module, nn.Linear):
            self.model.set_submodule(owner, PackedLinear(weight, module.bias))
            return
        table = PackedEmbedding(weight, dtype, getattr(module, "scalar_embed_scale", None))
        if self.config.tie_word_embeddings:
            self.model.set_output_embeddings(head := PackedLinear(weight))
            table.share(head)
        self.model.set_submodule(owner, table)

    def _order(self, path: str, found: Stored, device: torch.device) -> Tensor | None:
        """Of the rows in the file, those of the model; None: as they are."""
        if path not in self._orders:
            return None
        return torch.arange(found.shape[0], device=device).view(self._orders[path], -1, 2).transpose(1, 2).flatten()


def config_of(path: Path) -> Any:
    """The config object that a file becomes."""
    header = read_header(path)  # says what is wrong with a file that is none
    with explained(path, "config"):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        if size := header.get(f"{header.get('general.architecture')}.attention.key_length"):
            config.head_dim = size  # of some families Transformers takes the default
    return config


def names_of(kind: str, layers: int) -> Any:
    """Its `get_name` makes the names of GGUF's tensors of those of modules."""
    import gguf

    untyped: Any = gguf  # it carries no annotations
    known = {name: arch for arch, name in untyped.MODEL_ARCH_NAMES.items()}
    return untyped.get_tensor_name_map(known.get(kind, known["llama"]), layers)
