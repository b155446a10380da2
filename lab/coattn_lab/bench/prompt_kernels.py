"""Attention of a prompt's chunk: each kernel's rate, and how far its log-sum-exp is from plain float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coattn.kernels.prompt import Mask, attend_prompt
from coattn.kernels.prompt.attend import in_tiles
from coattn.kernels.prompt.choice import sample
from coattn.kernels.prompt.kernels import KERNELS, TILES, Kernel
from coattn.kernels.prompt.mask import Shape
from coattn.state import AttnState

CHOSEN = "chosen"
"""The row of what a prompt would be attended with."""
RUNS = 3
SLOW_S = 0.2
"""A call that takes longer is timed once."""


@dataclass(frozen=True)
class Row:
    """One kernel on the last chunk of a prompt. refused says why there are no figures."""

    kernel: str
    context: int
    chunk: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    tflops: float | None = None
    ms: float | None = None
    first_ms: float | None = None
    """The first call, with what is compiled in it."""
    lse_error: float | None = None
    out_error: float | None = None
    refused: str | None = None


def run(shape: Shape, contexts: list[int], chunks: list[int | None]) -> Iterator[Row]:
    """The last chunk of each context, on random numbers; a chunk of None is the whole prompt."""
    for context in contexts:
        for chunk in chunks:
            tokens = context if chunk is None else min(chunk, context)
            yield from _rows(replace(shape, tokens=tokens, keys=context))


def _rows(shape: Shape) -> Iterator[Row]:
    generator = torch.Generator(shape.device).manual_seed(0)
    q, k, v = (
        torch.randn(rows, heads, shape.head_dim, generator=generator, device=shape.device).to(shape.dtype)
        for rows, heads in (
            (shape.tokens, shape.q_heads),
            (shape.keys, shape.kv_heads),
            (shape.keys, shape.kv_heads),
        )
    )
    scale = shape.head_dim**-0.5
    rows, out, lse = sample(q, k, v, scale, shape.mask)
    for kernel in KERNELS:
        if kernel.name != "reference":
            yield _row(kernel.name, shape, _forced(kernel, q, k, v, scale, shape), rows, out, lse)
    yield _row(CHOSEN, shape, lambda: attend_prompt(q, k, v, scale, shape.mask), rows, out, lse)


def _forced(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float, shape: Shape
) -> Callable[[], AttnState] | str:
    """The whole call by one kernel; in tiles where it takes no more. Or why it cannot."""
    if kernel.name == "cudnn" and shape.tokens >= TILES[-1]:
        reason = kernel.refuses(replace(shape, tokens=TILES[-1], keys=TILES[-1], mask=Mask(False)))
        return reason or (lambda: in_tiles(q, k, v, scale, shape, kernel))
    if kernel.name == "cpu" and kernel.refuses(replace(shape, tokens=shape.keys)) is None:
        return lambda: attend_prompt(q, k, v, scale, shape.mask)
    return kernel.refuses(shape) or (lambda: kernel.run(q, k, v, scale, shape.mask))


def _row(name: str, shape: Shape, call: Callable[[], AttnState] | str, rows: Tensor, out: Tensor, lse: Tensor) -> Row:
    dtype = str(shape.dtype).removeprefix("torch.")
    row = Row(name, shape.keys, shape.tokens, shape.q_heads, shape.kv_heads, shape.head_dim, dtype)
    if isinstance(call, str):
        return replace(row, refused=call)
    try:
        first, state = timed(call, shape.device)
        lse_error = float((state.lse[rows].float() - lse).abs().max())
        out_error = float((state.out[rows].float() - out).norm() / out.norm())
        del state
        taken = [timed(call, shape.device)[0]]
        while len(taken) < RUNS and taken[0] < SLOW_S:
            taken.append(timed(call, shape.device)[0])
    except RuntimeError as error:  # a kernel that this machine's PyTorch cannot run
        return replace(row, refused=" ".join(str(error).split())[:200])
    best = min(taken)
    row = replace(row, tflops=shape.flops / best / 1e12, ms=best * 1e3, first_ms=first * 1e3)
    return replace(row, lse_error=lse_error, out_error=out_error)


def timed(call: Callable[[], AttnState], device: torch.device) -> tuple[float, AttnState]:
    """Seconds, and what came out."""
    synchronise(device)
    start = time.perf_counter()
    state = call()
    synchronise(device)
    return time.perf_counter() - start, state


def synchronise(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_tflops(device: torch.device, dtype: torch.dtype, width: int, inner: int) -> float:
    """TFLOP/s of a large product `[rows, width] x [width, inner]`: the rate of a prompt's linear layers."""
    rows = 8192 if device.type == "cuda" else 512
    x, w = (torch.randn(size, device=device).to(dtype) for size in ((rows, width), (inner, width)))
    fastest = float("inf")
    for _ in range(5):
        synchronise(device)
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        synchronise(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * rows * width * inner / fastest / 1e12
