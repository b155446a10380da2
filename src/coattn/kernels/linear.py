"""`linear`: a linear layer, and the residual it is added to."""

from torch import Tensor
from torch.nn import functional

from coattn.kernels.cuda import product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x `[.., k]` times weight `[n, k]`, plus residual `[.., n]`; the product is rounded before it is added."""
    if x.device.type == "cuda":
        from coattn.kernels.triton import linear as triton

        if product.refuses(x, weight) is None:
            return product.product(x, weight, bias, residual)
        if triton.refuses(x, weight) is None:
            return triton.linear(x, weight, bias, residual)
    out = functional.linear(x, weight, bias)
    return out if residual is None else residual + out
