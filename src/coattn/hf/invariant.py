"""A model's forward call in which a row's bits do not depend on the other rows: PyTorch's own operations in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coattn.errors import UnsupportedError
from coattn.hf.experts import holds_experts
from coattn.hf.quantised.module import PackedLinear
from coattn.kernels.invariant import invariant
from coattn.kernels.linear import linear_invariant

ROWWISE = (
    "_fused_rms_norm", "_to_copy", "_unsafe_view", "alias", "amax", "arange", "argmax", "as_strided", "cat",
    "clone", "constant_pad_nd", "copy_", "detach", "embedding", "empty", "empty_like", "empty_strided", "expand",
    "fill_", "full", "full_like", "gather", "index", "index_select", "isfinite", "lift_fresh", "max",
    "native_layer_norm", "new_empty", "new_empty_strided", "new_ones", "new_zeros", "ones", "ones_like", "permute",
    "record_stream", "repeat", "reshape", "scalar_tensor", "select", "slice", "split", "split_with_sizes", "squeeze",
    "stack", "t", "transpose", "unbind", "unsqueeze", "view", "where", "zero_", "zeros", "zeros_like",
)  # fmt: skip
"""Operations that give each row what they give it alone, besides those that PyTorch calls pointwise. A norm of a layer
is a block of threads for each row, whatever the number of rows; a maximum is the same in every order."""


@contextmanager
def row_invariant(most: int) -> Iterator[None]:
    """Inside this block a forward call gives a row the same bits among up to `most` rows as alone.

    Raises UnsupportedError at an operation of which that is not known.
    """
    with invariant(most), _Rows(most):
        yield


def check_modules(model: nn.Module) -> None:
    """Raises UnsupportedError for modules whose kernels choose by the number of tokens, and have no other form."""
    for module in model.modules():
        if holds_experts(module) or isinstance(module, PackedLinear):
            what = "experts" if holds_experts(module) else "quantised weights"
            raise UnsupportedError(
                f"deterministic is not for {what} on a GPU: their kernels choose by the number of tokens.",
                "Leave it out, or choose another model or device cpu.",
            )


class _Rows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products and sums are those of `linear_invariant`."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.overloadpacket.__name__, kwargs or {}
        if name in ROWWISE or torch.Tag.pointwise in func.tags or func.is_view:
            return func(*args, **given)
        made = None
        if name in ("mm", "addmm") and not given:
            made = self._product(*(args if name == "addmm" else (None, *args)))
        elif name == "bmm" and args[0].shape[-1] == 1:  # one product each, and nothing to add up
            made = args[0] * args[1]
        elif name in ("mean", "sum") and len(args) > 1 and args[1] in ([-1], [args[0].dim() - 1]):
            made = self._sum(*args, **given)
            made = made / args[0].shape[-1] if name == "mean" else made
        if made is None:
            raise UnsupportedError(
                f"deterministic is not for this model on a GPU: a step runs {func}, which may depend on the batch.",
                "Leave it out, or choose device cpu.",
            )
        return made

    def _product(self, bias: Tensor | None, x: Tensor, transposed: Tensor) -> Tensor | None:
        weight = transposed.t()
        if not weight.is_contiguous() or (bias is not None and bias.dim() != 1):
            return None
        return linear_invariant(x, weight, bias, None, self.most)

    def _sum(self, x: Tensor, _: Any, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """Over the last axis, by a product with ones; in float32."""
        ones = torch.ones(1, x.shape[-1], device=x.device)
        # rows of a step may have heads: more of them than there are tokens, in the same tiles
        made = linear_invariant(x.float(), ones, None, None, self.most).to(dtype or x.dtype)
        return made if keepdim else made.squeeze(-1)
