"""What stands in for entries that are not attended: the mean value, which leans the way a query weighs their keys.

Over the entries of a KV head, values are about linear in keys, and the scores of a query about a Gaussian, of which
those above its bound are attended. So the mean value under a query's weights is known without looking at any entry
again. With mean `m` and deviation `s` of the scores, and the bound `b`, the weighted mean of the scores left out is
`s * (s - h(b))` above `m`, where `h` is a Gaussian's density over its distribution, `(b - m) / s - s` deviations from
its middle; and values follow their covariance with the keys that far. Keys count in the AXES channels of their sketch
in which scores differ most.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.operation import Operation
from coattn.kernels.quantise.sketch import AXES, Sketcher

LEAST_SPREAD = 1e-3
"""Of scores: one that is less counts as so much."""
FURTHEST = 10.0
"""Deviations from the middle of a Gaussian that a bound counts as at most, on either side."""
HIGHEST = 0.999
"""Of a soft-capping's limit, what bounds count as at most."""


class Rest(NamedTuple):
    """What is known of the entries of a layer's sequences.

    sums: `[slots, kv_heads, width(d)]` float32 over entries: of each axis times the value `[AXES, d]`, of the axes, of
    their squares, of keys and of values `[d]` each, and how many. Axes are channels of a key as the sketch turns it.

    Owner and writer: the index, when a block has become full. Reader: attention, from the next step on.
    """

    sums: Tensor
    sketcher: Sketcher


def width(d: int) -> int:
    """Numbers that are kept of a KV head."""
    return AXES * (d + 2) + 2 * d + 1


def _rows(tables: Tensor, axes: Tensor) -> Tensor:
    """Of tables `[kv_heads, planes, ..]` the planes `axes` `[kv_heads, AXES]`, zeros where there is none."""
    heads = torch.arange(len(axes), device=axes.device)[:, None]
    found = tables[heads, axes.long()].float()
    return torch.where((axes >= 0).view(*axes.shape, *(1,) * (found.ndim - 2)), found, 0.0)


@Operation
def sum_rest(k: Tensor, v: Tensor, sketcher: Sketcher) -> Tensor:
    """Keys and values `[n, kv_heads, d]`, of any strides but the last -> their sums `[kv_heads, width]`."""
    of, start = _rows(sketcher.of, sketcher.axes), _rows(sketcher.start, sketcher.axes)
    k, v = k.float(), v.float()
    z = torch.einsum("nhd,had->nha", k, of) - start
    both = torch.einsum("nha,nhd->had", z, v).flatten(1)
    count = torch.full_like(both[:, :1], len(k))
    return torch.cat([both, z.sum(0), z.square().sum(0), k.sum(0), v.sum(0), count], 1)


@Operation
def flush_rest(gpu: Tensor, sums: Tensor, block: Tensor, to: Tensor, seq: Tensor, sketcher: Sketcher) -> None:
    """Adds blocks that became full to the sums of their sequences `[rows]`.

    gpu `[n, kv_heads, 2, block, d]`; block, to `[rows]`: of each row its filling block, and where the full one went in
    DRAM; -1: it is not full.
    """
    for row in (to >= 0).nonzero()[:, 0].tolist():
        k, v = gpu[int(block[row])].transpose(0, 1).transpose(1, 2)
        sums[int(seq[row])] += sum_rest.reference(k, v, sketcher)


def lean(above: Tensor, spread: Tensor) -> Tensor:
    """How far scores that are weighed by their own powers and lie below a bound are from their mean, of what they would
    be without a bound. above: deviations of the bound from the middle of the weighed ones."""
    distribution: Tensor = torch.special.log_ndtr(above)
    return 1 - (-above.square() / 2 - math.log(2 * math.pi) / 2 - distribution).exp() / spread


@Operation
def rest_value(
    q: Tensor, rest: Rest, bound: Tensor, wait: Tensor, seq: Tensor, scale: float, softcap: float | None, out: Tensor
) -> None:
    """q `[rows, q_heads, d]` -> out, like it in float32: what stands in for the entries that each of them leaves out.

    bound `[rows, q_heads]` and wait `[rows]`: entries are left out whose score is less than their sum.
    """
    sums, sketcher = rest
    (rows, _, d), kv_heads = q.shape, sums.shape[1]
    own = sums[seq.long()]
    own = own[..., :-1] / own[..., -1:].clamp_min(1)
    both, flat = own[..., : AXES * d].view(rows, kv_heads, AXES, d), own[..., AXES * d :]
    z, squares, k, v = flat[..., :AXES], flat[..., AXES : 2 * AXES], flat[..., 2 * AXES : -d], flat[..., -d:]
    covariance = both - z[..., None] * v[..., None, :]
    variance = (squares - z.square()).clamp_min(0)
    grouped = q.float().view(rows, kv_heads, -1, d) * scale
    asked = torch.einsum("rhgd,had->rhga", grouped, _rows(sketcher.worth, sketcher.axes))
    middle = torch.einsum("rhgd,rhd->rhg", grouped, k)
    spread = torch.einsum("rhga,rha->rhg", asked.square(), variance).sqrt().clamp_min(LEAST_SPREAD)
    most = bound.view_as(middle) + wait[:, None, None]
    if softcap is not None:
        most = softcap * (most / softcap).clamp(-HIGHEST, HIGHEST).atanh()
    above = ((most - middle) / spread - spread).clamp(-FURTHEST, FURTHEST)
    leant = asked * lean(above, spread)[..., None]
    out.copy_((v[:, :, None] + torch.einsum("rhga,rhad->rhgd", leant, covariance)).view(q.shape))
