"""Which kernel a shape gets: by a table, so that two processes on the same kind of GPU choose alike and round alike.

Before a kernel is first used it is tried on a few random numbers: one that PyTorch cannot run here, or that is wrong,
is passed over.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from coattn.kernels.prompt.kernels import KERNELS, PIECES, TILES, Kernel
from coattn.kernels.prompt.mask import Mask, Shape
from coattn.kernels.prompt.reference import reference

HOPPER = (9, 0)
"""From this generation on cuDNN gets tiles (docs/log/kernels.md). Newer GPUs are taken to be alike; on older ones flash
attention comes first: it was written for them."""
FASTEST, FASTEST_BEFORE = ("cudnn", "own", "flash", "reference"), ("flash", "own", "cudnn", "reference")
LEAST_TOKENS = 128
"""Fewer queries get the first kernel that fits."""
FEW_TOKENS, FEW_KEYS = 512, 2048
"""What kernels are tried on that take any numbers."""
LSE_ERROR, OUT_ERROR = 1e-3, 2e-2
"""Most that a kernel may differ: of the log-sum-exp absolute, of the output relative. A wrong layout gives more."""


def best(shape: Shape) -> Kernel:
    """The first kernel of the device's table that takes a shape and gives the right numbers."""
    fits = [kernel for kernel in KERNELS if kernel.refuses(shape) is None]
    if len(fits) <= 2 or shape.device.type == "cpu" or shape.tokens < LEAST_TOKENS:
        return fits[0]  # nothing to choose from but the reference, or nothing to gain
    order = FASTEST if capability(shape.device) >= HOPPER else FASTEST_BEFORE
    fits.sort(key=lambda kernel: order.index(kernel.name))
    return next((kernel for kernel in fits if is_right(kernel, probe(shape))), fits[-1])


def tile_kernel(shape: Shape) -> Kernel | None:
    """The kernel that takes tiles only, where cutting a shape into them is faster than another kernel on the whole."""
    kernel = KERNELS[0]
    if shape.device.type != "cuda" or not shape.mask.plain or shape.tokens < TILES[-1] or shape.keys < PIECES[-1]:
        return None
    if capability(shape.device) < HOPPER:
        return None
    asked = replace(shape, tokens=TILES[-1], keys=TILES[-1], mask=Mask(False))
    return kernel if kernel.refuses(asked) is None and is_right(kernel, asked) else None


def probe(shape: Shape) -> Shape:
    """A small shape on which a kernel is tried in place of `shape`: the same but for its numbers of tokens."""
    if shape.tokens in TILES and shape.keys in PIECES:
        return replace(shape, tokens=TILES[-1], keys=TILES[-1])
    return replace(shape, tokens=FEW_TOKENS, keys=FEW_KEYS)


def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU: its generation, such as (9, 0)."""
    return torch.cuda.get_device_capability(device)


@cache
def is_right(kernel: Kernel, shape: Shape) -> bool:
    """Whether a kernel gives the numbers of a plain computation, tried once in a process; the reference does."""
    return kernel.name == "reference" or flaw(kernel, shape) is None


def draw(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v: the same for the same shape."""
    generator = torch.Generator(shape.device).manual_seed(0)

    def numbers(rows: int, heads: int) -> Tensor:
        size = (rows, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=shape.device, dtype=torch.float32).to(shape.dtype)

    return (
        numbers(shape.tokens, shape.q_heads),
        numbers(shape.keys, shape.kv_heads),
        numbers(shape.keys, shape.kv_heads),
    )


def flaw(kernel: Kernel, shape: Shape) -> str | None:
    """Why a kernel cannot take a shape, or what is wrong with its numbers; None where they are right."""
    reason = kernel.refuses(shape)
    if reason is not None:
        return reason
    given = (*draw(shape), shape.head_dim**-0.5, shape.mask)
    try:
        state, right = kernel.run(*given), reference(*given)
        lse_error = float((state.lse.float() - right.lse).abs().max())
        out_error = float((state.out.float() - right.out).norm() / right.out.norm())
    except Exception as error:  # a kernel that this machine's PyTorch cannot run
        return " ".join(str(error).split())[:200] or type(error).__name__
    # compared so that a nan is wrong too
    if not (lse_error <= LSE_ERROR and out_error <= OUT_ERROR):
        return f"its log-sum-exp differs by {lse_error:.1e}, its output by {out_error:.1e}"
    return None
