"""`linear`: a linear layer, and the residual it is added to."""

from torch import Tensor
from torch.nn import functional

from coattn.kernels.cuda import product
from coattn.kernels.packed_linear import packed_linear
from coattn.kernels.quantise.weights import Packed


def linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x `[.., k]` times weight `[n, k]`, packed or not, plus residual `[.., n]`; rounded before it is added."""
    if isinstance(weight, Packed):
        return packed_linear(x, weight, bias, residual)
    if x.device.type == "cuda":
        from coattn.kernels.triton import linear as triton

        if product.refuses(x, weight) is None:
            return product.product(x, weight, bias, residual)
        if triton.refuses(x, weight) is None:
            return triton.linear(x, weight, bias, residual)
    out = functional.linear(x, weight, bias)
    return out if residual is None else residual + out
