"""A linear module whose weights stay packed."""

from __future__ import annotations

from torch import Tensor, nn

from coattn.kernels.packed_linear import packed_linear
from coattn.kernels.quantise.weights import Packed


class PackedLinear(nn.Module):
    """Takes the place of `nn.Linear`. Its tensors are parameters, so that what counts, moves or hashes parameters does
    so here too; none of them has a dtype that activations could be mistaken for but the scales."""

    codes: nn.Parameter
    scales: nn.Parameter
    zeros: nn.Parameter | None
    order: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, weight: Packed, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.in_features, len(weight.codes)
        self.form, self.group, self.rows = weight.form, weight.group, weight.rows
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        for name in ("codes", "scales", "zeros", "order"):
            tensor = weight.tensors.get(name)
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    @property
    def packed(self) -> Packed:
        """The matrix, where its tensors are now."""
        return Packed(self.codes, self.scales, self.zeros, self.order, self.form, self.group, self.rows)

    def fill(self, weight: Packed) -> None:
        """Other tensors of the same shapes."""
        for name, tensor in weight.tensors.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.form}, group={self.group}"
