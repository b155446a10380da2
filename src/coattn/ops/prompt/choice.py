"""Which kernel a shape gets: by a short measurement on the device, made when the shape is first seen, and checked.

Shapes are measured by their powers of two, up to a size at which rates do not change any more. What was found is kept
for the life of the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coattn.ops.prompt.kernels import KERNELS, PIECES, TILES, Kernel
from coattn.ops.prompt.mask import Mask, Shape

LEAST_TOKENS = 128
"""Queries from which the choice is worth a measurement; fewer get the first kernel that fits."""
MOST_TOKENS, MOST_KEYS = 8192, 16384
FEW_TOKENS, FEW_KEYS = 512, 2048
"""What stands for all chunks that are too short for tiles: in steps that also decode, sizes change all the time."""
GAIN = 1.05
"""How much faster a kernel for tiles must be: merging what the tiles give costs a few percent."""
ROWS = 32
"""Queries whose result is compared with a plain computation in float32."""
LSE_ERROR, OUT_ERROR = 1e-3, 2e-2
"""Most that a kernel may differ: of the log-sum-exp absolute, of the output relative. A wrong layout gives more."""
RUNS = 3


@dataclass(frozen=True)
class Measured:
    """One kernel on one shape; refused says why there are no figures."""

    kernel: str
    refused: str | None = None
    ms: float | None = None
    """The fastest of a few runs."""
    first_ms: float | None = None
    """The first run, with what is compiled in it."""
    tflops: float | None = None
    lse_error: float | None = None
    out_error: float | None = None


_kept: dict[Shape, tuple[Measured, ...]] = {}


def best(shape: Shape) -> Kernel:
    """The fastest kernel that gives the right numbers."""
    fits = [kernel for kernel in KERNELS if kernel.refuses(shape) is None]
    if len(fits) <= 2 or shape.device.type == "cpu" or shape.tokens < LEAST_TOKENS:
        return fits[0]  # nothing to choose from but the reference, or nothing to gain
    found = measure(representative(shape))
    times = {each.kernel: each.ms for each in found if each.ms is not None}
    return min(fits, key=lambda kernel: times.get(kernel.name, float("inf")))


def tile_kernel(shape: Shape) -> Kernel | None:
    """The kernel that takes tiles only, where cutting a shape into them is faster than another kernel on the whole."""
    kernel = KERNELS[0]
    if shape.device.type != "cuda" or not shape.mask.plain or shape.tokens < TILES[-1] or shape.keys < PIECES[-1]:
        return None
    tile = next(size for size in TILES if size <= shape.tokens)
    keys = next(size for size in PIECES if size <= min(shape.keys, MOST_KEYS))
    asked = replace(shape, tokens=tile, keys=keys, mask=Mask(False))
    if kernel.refuses(asked) is not None:
        return None
    times = {each.kernel: each.ms for each in measure(asked) if each.ms is not None}
    own = times.pop(kernel.name, None)
    return kernel if own is not None and all(GAIN * own <= other for other in times.values()) else None


def representative(shape: Shape) -> Shape:
    """The shape that is measured in its place."""
    if LEAST_TOKENS <= shape.tokens < TILES[-1]:
        keys = FEW_KEYS if shape.keys < MOST_KEYS // 2 else MOST_KEYS
        return replace(shape, tokens=FEW_TOKENS, keys=keys)
    tokens, keys = (min(_power(n), most) for n, most in ((shape.tokens, MOST_TOKENS), (shape.keys, MOST_KEYS)))
    return replace(shape, tokens=tokens, keys=max(tokens, keys) if shape.mask.causal else keys)


def measure(shape: Shape, names: tuple[str, ...] | None = None) -> tuple[Measured, ...]:
    """Every kernel but the reference on random numbers of this shape, or those named. Kept, unless names are given."""
    if names is None and shape in _kept:
        return _kept[shape]
    generator = torch.Generator(shape.device).manual_seed(0)

    def draw(rows: int, heads: int) -> Tensor:
        size = (rows, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=shape.device, dtype=torch.float32).to(shape.dtype)

    q, k, v = draw(shape.tokens, shape.q_heads), draw(shape.keys, shape.kv_heads), draw(shape.keys, shape.kv_heads)
    tried = [kernel for kernel in KERNELS if (kernel.name in names if names else kernel.name != "reference")]
    found = tuple(_measure(kernel, shape, q, k, v) for kernel in tried)
    if names is None:
        _kept[shape] = found
    return found


def _measure(kernel: Kernel, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Measured:
    reason = kernel.refuses(shape)
    if reason is not None:
        return Measured(kernel.name, reason)
    scale = shape.head_dim**-0.5
    try:
        _wait(shape.device)
        start = time.perf_counter()
        state = kernel.run(q, k, v, scale, shape.mask)
        _wait(shape.device)
        first = (time.perf_counter() - start) * 1e3
        rows, out, lse = sample(q, k, v, scale, shape.mask)
        lse_error = float((state.lse[rows].float() - lse).abs().max())
        out_error = float((state.out[rows].float() - out).norm() / out.norm())
        # compared so that a nan is wrong too
        if not (lse_error <= LSE_ERROR and out_error <= OUT_ERROR):
            wrong = f"its log-sum-exp differs by {lse_error:.1e}, its output by {out_error:.1e}"
            return Measured(kernel.name, wrong, lse_error=lse_error, out_error=out_error)
        del state
        ms = _time(lambda: kernel.run(q, k, v, scale, shape.mask), shape.device)
    except Exception as error:  # a kernel that this machine's PyTorch cannot run
        return Measured(kernel.name, " ".join(str(error).split())[:200] or type(error).__name__)
    return Measured(kernel.name, None, ms, first, shape.flops / ms / 1e9, lse_error, out_error)


def sample(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Some rows, their output `[rows, q_heads, d]` and lse `[rows, q_heads]`, in float32."""
    t, n, group = len(q), len(k), q.shape[1] // k.shape[1]
    rows = torch.linspace(0, t - 1, min(ROWS, t), device=q.device).long()
    part = q[rows].float().view(len(rows), k.shape[1], group, q.shape[2])
    scores = torch.einsum("rhgd,nhd->rhgn", part, k.float()) * scale
    if mask.softcap is not None:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    if mask.causal:
        behind = (n - t + rows)[:, None] - torch.arange(n, device=q.device)
        seen = behind >= 0
        if mask.window is not None:
            seen &= (behind < mask.window) | (torch.arange(n, device=q.device) < mask.sinks)
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    out = torch.einsum("rhgn,nhd->rhgd", scores.softmax(-1), v.float())
    return rows, out.flatten(1, 2), scores.logsumexp(-1).flatten(1)


def _time(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of the fastest run, after one to warm up."""
    run()
    fastest = float("inf")
    for _ in range(RUNS):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _power(count: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (count.bit_length() - 1)
