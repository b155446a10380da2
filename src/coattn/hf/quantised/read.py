"""A checkpoint in 4 or 8 bits as a model: out of its safetensors and config.json, without any other package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from coattn.hf.models.resolve import shards
from coattn.hf.quantised.formats import Format, MisshapenError, formats_of
from coattn.hf.quantised.module import PackedLinear
from coattn.hf.refusals import refuse_gaps
from coattn.hf.stored import COMPUTED, stored

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""As safetensors names them; a tensor of another dtype is not seen."""


class Entry(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    like: Tensor
    """Its shape and dtype, without memory."""


class Checkpoint:
    """The model that a folder's files make. It has no memory until `fill`: of the files only the headers are read.

    A linear layer is packed where the files say so, whatever lists of exceptions config.json has.
    """

    def __init__(
        self, folder: Path, name: str, config: Any, dtype: torch.dtype, renamed: Mapping[str, str] | None = None
    ) -> None:
        """renamed: patterns of tensors' names, and what they become in the model.

        Raises ModelError where tensors are missing or do not fit.
        """
        self.folder, self.entries = folder, dict(_entries(folder, renamed or {}))
        self.model = skeleton(config, dtype)
        self._packed: dict[str, tuple[Format, dict[str, Entry]]] = {}
        self._missing: list[str] = []
        self._misshapen: list[str] = []
        formats = formats_of(config.quantization_config)
        for path, module in list(self.model.named_modules()):
            if type(module) is nn.Linear:
                self._replace(path, module, formats)
        self._plain = [(path, tensor) for path, tensor in stored(self.model) if not self._is_packed(path)]
        for path, tensor in self._plain:
            entry = self.entries.get(path)
            if entry is None:
                self._missing.append(path)
            elif entry.like.shape != tensor.shape or (tensor.is_floating_point() and entry.like.dtype not in COMPUTED):
                self._misshapen.append(path)
        refuse_gaps(name, self._missing, self._misshapen)

    @torch.no_grad()
    def fill(self, device: torch.device) -> PreTrainedModel:
        """The model with its weights on a device, where its layers are packed one after the other."""
        files: dict[Path, Any] = {
            entry.file: safe_open(entry.file, "pt", device=str(device)) for entry in self.entries.values()
        }

        def read(entry: Entry) -> Tensor:
            tensor: Tensor = files[entry.file].get_tensor(entry.name)
            return tensor.clone() if device.type == "cpu" else tensor  # else it would be the file's own memory

        for path, tensor in self._plain:
            owner, _, name = path.rpartition(".")
            found = read(self.entries[path]).to(tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            made = nn.Parameter(found, requires_grad=False) if is_parameter else found
            setattr(self.model.get_submodule(owner), name, made)
        for path, (form, entries) in self._packed.items():
            module = self.model.get_submodule(path)
            assert isinstance(module, PackedLinear)
            tensors = {end: read(entry) for end, entry in entries.items()}
            try:
                module.fill(form.read(tensors, module.out_features, module.in_features))
            except MisshapenError as error:  # groups of columns that are not equally large
                refuse_gaps(str(self.folder), [], [f"{path}.{error}"])
        self.model.tie_weights()
        self.model.to(device)
        if (self.folder / "generation_config.json").is_file():
            self.model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return self.model

    def _is_packed(self, path: str) -> bool:
        owner, _, name = path.rpartition(".")
        return owner in self._packed and name != "bias"

    def _replace(self, path: str, linear: nn.Linear, formats: list[Format]) -> None:
        form = next((form for form in formats if self._marked(path, form)), None)
        if form is None:
            return
        entries = {end: entry for end in (*form.needs, *form.may) if (entry := self.entries.get(f"{path}.{end}"))}
        missing = [f"{path}.{end}" for end in form.needs if end not in entries]
        self._packed[path] = form, entries
        self._missing += missing
        if missing:
            return
        n, k = linear.out_features, linear.in_features
        try:
            packed = form.read({end: entry.like for end, entry in entries.items()}, n, k)
        except MisshapenError as error:
            self._misshapen.append(f"{path}.{error}")
            return
        self.model.set_submodule(path, PackedLinear(packed, linear.bias))

    def _marked(self, path: str, form: Format) -> bool:
        """Whether a layer is stored in this form, though its tensors may not be complete."""
        weight = self.entries.get(f"{path}.weight")
        if weight is not None:
            return "weight" in form.needs and weight.like.dtype not in COMPUTED
        return "weight" not in form.needs and any(f"{path}.{end}" in self.entries for end in form.needs)


def skeleton(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose parameters have no memory; what it computes by itself, such as frequencies, is there."""
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # parameters without memory were made one by one
    return model


def _entries(folder: Path, renamed: Mapping[str, str]) -> Iterator[tuple[str, Entry]]:
    """Every tensor of a folder, by its name in the model."""
    for file in shards(folder, {path.name for path in folder.iterdir()}):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no dictionary
                part = opened.get_slice(name)
                if part.get_dtype() in DTYPES:
                    like = torch.empty(part.get_shape(), dtype=DTYPES[part.get_dtype()], device="meta")
                    own = name
                    for pattern, by in renamed.items():
                        own = re.sub(pattern, by, own)
                    yield own, Entry(file, name, like)
