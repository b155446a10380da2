"""A checkpoint in 4 or 8 bits as a model: out of its safetensors and config.json, without any other package."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from coattn.hf.experts import is_experts
from coattn.hf.models.resolve import shards
from coattn.hf.quantised.formats import MXFP4, Format, MisshapenError, check_alike, formats_of, stack
from coattn.hf.quantised.module import PackedExperts, PackedLinear, PackedModule
from coattn.hf.refusals import refuse_gaps
from coattn.hf.stored import COMPUTED, stored
from coattn.kernels.quantise.weights import Packed, join_packed

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""As safetensors names them; a tensor of another dtype is not seen."""


EXPERTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""How files name the matrices of an expert: the gate, what it multiplies, and the last one."""
RENAMED = {r"\.block_sparse_moe\.": ".mlp."}
"""Modules that have other names in files than in Transformers."""


class Entry(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    like: Tensor
    """Its shape and dtype, without memory."""


class Piece(NamedTuple):
    """A matrix in files, or some rows of one."""

    path: str
    form: Format
    entries: dict[str, Entry]
    n: int
    k: int

    def read(self, get: Callable[[Entry], Tensor]) -> Packed:
        """get: what an entry is read as."""
        try:
            return self.form.read({end: get(entry) for end, entry in self.entries.items()}, self.n, self.k)
        except MisshapenError as error:
            raise MisshapenError(f"{self.path}{self.form.joint}{error}") from None


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
        self.folder, self.entries = folder, dict(_entries(folder, RENAMED | dict(renamed or {})))
        self.model = skeleton(config, dtype)
        self._packed: dict[str, list[list[Piece]]] = {}
        """By path of a packed module, what becomes one matrix, of each expert, or of the layer."""
        self._missing: list[str] = []
        self._misshapen: list[str] = []
        formats = formats_of(config.quantization_config)
        for path, module in list(self.model.named_modules()):
            if type(module) is nn.Linear:
                self._replace(path, module, formats)
            elif is_experts(module):
                self._replace_experts(path, module, formats)
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
        for path, matrices in self._packed.items():
            module = self.model.get_submodule(path)
            assert isinstance(module, PackedModule)
            try:
                weights = [_read(pieces, read) for pieces in matrices]
                module.fill(stack(weights) if module.codes.dim() > weights[0].codes.dim() else weights[0])
            except MisshapenError as error:  # groups of columns that are not equally large
                refuse_gaps(str(self.folder), [], [str(error)])
        self.model.tie_weights()
        self.model.to(device)
        if (self.folder / "generation_config.json").is_file():
            self.model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return self.model

    def _is_packed(self, path: str) -> bool:
        owner, _, name = path.rpartition(".")
        return owner in self._packed and name != "bias"

    def _replace(self, path: str, linear: nn.Linear, formats: list[Format]) -> None:
        piece = self._piece(path, (linear.out_features, linear.in_features), formats)
        if piece is not None:
            self._packed[path] = [[piece]]
            if (packed := self._like([[piece]])) is not None:
                self.model.set_submodule(path, PackedLinear(packed, linear.bias))

    def _replace_experts(self, path: str, own: Any, formats: list[Format]) -> None:
        """Their two matrices lie in the files of all experts together, or one by one, the rows of the first apart."""
        first, second = (tuple(tensor.shape[1:]) for tensor in (own.gate_up_proj, own.down_proj))
        if own.is_transposed:
            first, second = first[::-1], second[::-1]
        wholes = self._piece(f"{path}.gate_up_proj", first, [MXFP4]), self._piece(f"{path}.down_proj", second, [MXFP4])
        if wholes[0] is not None and wholes[1] is not None:
            matrices = [[[wholes[0]]], [[wholes[1]]]]
        elif names := next((names for names in EXPERTS if self._has_expert(f"{path}.0", names, formats)), None):
            half, each = (first[0] // 2, first[1]), range(int(own.num_experts))
            matrices = [
                [[self._piece_of(f"{path}.{i}.{name}", half, formats) for name in names[:2]] for i in each],
                [[self._piece_of(f"{path}.{i}.{names[2]}", second, formats)] for i in each],
            ]
        else:
            return
        made = [self._like(turn, many=wholes[0] is None) for turn in matrices]
        self._packed |= {f"{path}.first": matrices[0], f"{path}.second": matrices[1]}
        if made[0] is not None and made[1] is not None:
            if any(len(x.codes) != own.num_experts for x in (made[0], made[1])):
                self._misshapen.append(f"{path}.gate_up_proj_blocks")
            self.model.set_submodule(path, PackedExperts(own, made[0], made[1]))
        own.gate_up_proj = own.down_proj = None  # they are not looked for in the files

    def _has_expert(self, path: str, names: Sequence[str], formats: list[Format]) -> bool:
        return any(self._marked(f"{path}.{name}", form) for name in names for form in formats)

    def _piece(self, path: str, size: tuple[int, ...], formats: list[Format]) -> Piece | None:
        """A matrix as it is stored; None: in none of these forms."""
        form = next((form for form in formats if self._marked(path, form)), None)
        return None if form is None else self._piece_of(path, size, [form])

    def _piece_of(self, path: str, size: tuple[int, ...], formats: list[Format]) -> Piece:
        """A matrix that must be stored in one of these forms."""
        form = next((form for form in formats if self._marked(path, form)), formats[0])
        named = {end: f"{path}{form.joint}{end}" for end in (*form.needs, *form.may)}
        entries = {end: entry for end, name in named.items() if (entry := self.entries.get(name))}
        self._missing += [named[end] for end in form.needs if end not in entries]
        return Piece(path, form, entries, *size)

    def _like(self, matrices: list[list[Piece]], many: bool = False) -> Packed | None:
        """Matrices without memory, where the files have what they need. many: of experts, which are stored alike."""
        pieces = [piece for turn in matrices for piece in turn]
        if any(end not in piece.entries for piece in pieces for end in piece.form.needs):
            return None
        for piece, model in zip(pieces, len(matrices) * matrices[0], strict=True):
            likes = [{end: (x.like.shape, x.like.dtype) for end, x in each.entries.items()} for each in (piece, model)]
            self._misshapen += [f"{piece.path}.{end}" for end, like in likes[0].items() if likes[1].get(end) != like]
        try:
            made = _read(matrices[0], lambda entry: entry.like)
        except MisshapenError as error:
            self._misshapen.append(str(error))
            return None
        more: dict[str, Any] = {name: x.new_empty((len(matrices), *x.shape)) for name, x in made.tensors.items()}
        return made._replace(**more) if many else made

    def _marked(self, path: str, form: Format) -> bool:
        """Whether a layer is stored in this form, though its tensors may not be complete."""
        weight = self.entries.get(f"{path}.weight")
        if weight is not None:
            return "weight" in form.needs and weight.like.dtype not in COMPUTED
        return "weight" not in form.needs and any(f"{path}{form.joint}{end}" in self.entries for end in form.needs)


def _read(pieces: list[Piece], get: Callable[[Entry], Tensor]) -> Packed:
    """Rows of a matrix that lie apart, as one."""
    parts = [piece.read(get) for piece in pieces]
    if len(parts) == 1:
        return parts[0]
    check_alike(parts)
    return join_packed(parts)


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
