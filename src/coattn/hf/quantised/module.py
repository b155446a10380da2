"""Modules whose weights stay packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coattn.kernels.packed_experts import packed_experts
from coattn.kernels.packed_linear import packed_embedding, packed_linear
from coattn.kernels.quantise.weights import TENSORS, Packed


class PackedModule(nn.Module):
    """Its tensors are parameters, so that what counts, moves or hashes parameters does so here too; none of them has a
    dtype that activations could be mistaken for but the scales."""

    codes: nn.Parameter
    scales: nn.Parameter
    zeros: nn.Parameter | None
    order: nn.Parameter | None
    high: nn.Parameter | None
    supers: nn.Parameter | None

    def __init__(self, weight: Packed) -> None:
        super().__init__()
        self.form, self.group, self.rows = weight.form, weight.group, weight.rows
        for name in TENSORS:
            self.register_parameter(name, None)
        self.fill(weight)

    @property
    def packed(self) -> Packed:
        """The matrix, where its tensors are now."""
        form = self.form, self.group, self.rows
        return Packed(self.codes, self.scales, self.zeros, self.order, *form, self.high, self.supers)

    def fill(self, weight: Packed) -> None:
        """Other tensors of the same shapes."""
        for name, tensor in weight.tensors.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))


class PackedLinear(PackedModule):
    """Takes the place of `nn.Linear`."""

    bias: nn.Parameter | None

    def __init__(self, weight: Packed, bias: Tensor | None = None) -> None:
        super().__init__(weight)
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.form}, group={self.group}"


class PackedExperts(nn.Module):
    """Takes the place of a module of experts, as Transformers' experts interface has it."""

    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, own: Any, first: Packed, second: Packed) -> None:
        """own: the module, which gives its activation and its biases. first, second: as `packed_experts` has them."""
        super().__init__()
        self.num_experts = int(own.num_experts)
        self.first, self.second = PackedModule(first), PackedModule(second)
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            self.register_parameter(name, getattr(own, name, None))
        self._gate = own._apply_gate

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        first, second = (self.first.packed, self.gate_up_proj_bias), (self.second.packed, self.down_proj_bias)
        return packed_experts(x, index, weights, first, second, self._gate)

    def extra_repr(self) -> str:
        return f"{self.num_experts}, {self.first.form}, group={self.first.group}"


class PackedEmbedding(PackedModule):
    """Takes the place of `nn.Embedding`. dtype: of what it gives; scale: with which some families multiply that."""

    def __init__(self, weight: Packed, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__(weight)
        self.num_embeddings, self.embedding_dim = weight.out_features, weight.in_features
        self.dtype = dtype
        self.scale = None if scale is None else float(torch.tensor(scale).to(dtype))

    @property
    def weight(self) -> nn.Parameter:
        """Tells where the table lies. Its numbers are codes."""
        return self.codes

    def share(self, head: Any) -> None:
        """A head that is tied to the table has the same parameters."""
        for name in self.packed.tensors:
            setattr(head, name, self.get_parameter(name))

    def forward(self, ids: Tensor) -> Tensor:
        found = packed_embedding(ids, self.packed, self.dtype)
        return found if self.scale is None else found * self.scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.form}, group={self.group}"
