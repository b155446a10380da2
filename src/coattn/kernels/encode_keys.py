"""`encode_keys`: keys to the codes of a codebook."""

from __future__ import annotations

from torch import Tensor

from coattn.kernels.quantise.codebook import Codebook


def encode_keys(book: Codebook, keys: Tensor) -> Tensor:
    """keys `[..., d]`, with a basis `[..., kv_heads, d]` -> codes `[..., groups]` int16. On a GPU: Triton."""
    if keys.device.type != "cuda":
        return book.encode(keys)
    from coattn.kernels.triton.nearest import nearest

    turned = keys if book.basis is None else book.basis.keys(keys)
    found = nearest(turned.reshape(-1, turned.shape[-1]), book.centroids, book.grid)
    return found.view(*turned.shape[:-1], book.groups)
