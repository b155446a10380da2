"""What the kernel of `auto`'s scores makes of numbers, in PyTorch: the precision that it has, and no other error."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coattn.kernels.quantise.sketch import WORD, Scan, Sketched, Sketcher


@dataclass(frozen=True)
class Rounded(Sketcher):
    """Tables under which a plane is worth to a query what `score_sketch.cu` says in 8 bits.

    The largest of a query head's counts 127 steps. Planes whose numbers the kernel multiplies as they lie in a byte
    have a step that grows with their place: fourfold from one pair to the next within half a byte. Each half has its
    own largest, but in the words that are left over, whose upper half is shifted down.
    """

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        worth, base = super().queries(q)
        plane = torch.arange(worth.shape[-1])
        bit, own = plane % 8, len(plane) // (4 * WORD)
        left_over = (plane // WORD % own == own - 1) & bool(own % 2)
        kind, unit = torch.where(left_over, 0, bit // 4), 2.0 ** (bit % 4)
        for each in range(int(kind.max()) + 1):
            at = kind == each
            codes = worth[..., at] / unit[at]
            step = codes.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
            worth[..., at] = (codes / step).round() * step * unit[at]
        return worth, base


def rounded(keys: Sketched) -> Sketched:
    """The same keys, scored as the kernel does."""
    return keys._replace(sketcher=Rounded(*keys.sketcher.tensors()))


def check_rounded(got: Tensor, want: Tensor, scan: Scan, more: float = 0.0) -> None:
    """Whether a kernel's scores, or logarithms of sums of their powers, are those of `rounded` tables.

    Sums start at 1.5 * 2^23 steps of each half, of which float32 rounds three quarters of a step away, four times at
    most. And a number between two codes may become either one, since the kernel adds its products up in another order:
    12 steps, as a pair of planes counts up to 3 * 4 codes. That is rare, so on average there is only the rounding.

    more: relative error allowed besides.
    """
    factors = torch.tensor([1.0, 16.0], device=scan.scales.device)[: scan.scales.shape[-1]]
    step = float((scan.scales[:, :, : scan.group] * factors).max())
    error = (got - want).abs() - (1e-5 + more) * want.abs()
    error = torch.where(got == want, 0.0, error)
    assert (error <= (3 + 12) * step).all(), (float(error.max()), step)
    assert error.sum() <= 3 * step * error.numel(), (float(error.mean()), step)
