"""Sketches of keys: a few bits a token, by which any query's score is a sum over the bits that are set.

A score is `q . k`. An error of a key costs most along directions in which queries are large, so keys are turned by the
root of the queries' second moment and then to their own main axes: there the errors of channels add up as they are.
Every channel gets as many bits as pay most, the first a sign, the next halves; a channel of little spread gets none. A
channel's number is the sum of its bits, each worth twice the one below it: so a code is a set of *planes*, one bit a
token each, and a query is turned once into what each plane is worth to it. Bits come in pairs, since a kernel takes
two of a channel for the price of one. How they are dealt out differs from head to head and shows in these tables alone.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.kernels.quantise.layer_file import LayerFile

LEFT = (1.0, 0.3634, 0.1188, 0.0374, 0.0115, 0.0035, 0.001)
"""Of a Gaussian channel's variance, what is lost with so many bits of equal steps."""
STEPS = (1.0, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041)
"""The best step for so many bits, in standard deviations."""
FLOOR = 0.1
"""Of the mean second moment of queries: added to every direction, since a text shows only some."""
THREADS = 8
WORD = 32
"""Planes in a stored number."""
PAIR = 2
"""Bits that a channel gets at a time, which lie side by side."""
AXES = 32
"""Channels in which scores differ most, as turned keys have them: see `kernels/rest.py`."""


@dataclass(frozen=True)
class Scan:
    """Scores of which only the highest of each token are written: the others are made again where they count.

    operand, scales, rest, base: of the queries, as the kernels of `module` have them. kept, table, tokens, seq: what
    is scored. lse: see `Scores`, of `chunk` tokens each; None: nothing has been scored yet.
    """

    operand: Tensor
    scales: Tensor
    rest: Tensor
    base: Tensor
    kept: Tensor
    table: Tensor
    tokens: Tensor
    seq: Tensor
    lse: Tensor | None
    group: int
    chunk: int
    softcap: float | None
    module: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the scores, were they written: `[rows, kv_heads, group, n]`."""
        rows, heads = self.base.shape[:2]
        return rows, heads, self.group, self.table.shape[1] * self.kept.shape[2]


class Scores(NamedTuple):
    """What a sketch says of a step's queries.

    scores: `[rows, kv_heads, group, n]`, scaled and soft-capped; minus infinity for entries that are attended to in a
    pool; past a row's tokens: anything. lse, inside: `[rows, parts, q_heads]` float32, of pieces of all others, and of
    these.
    guess: `[rows, q_heads]` float32: see `guess`. off: like it, see `PoolTensors.off`.
    """

    scores: Tensor | Scan
    lse: Tensor
    inside: Tensor
    guess: Tensor
    off: Tensor


def guess(worth: Tensor, rest: Tensor, softcap: float | None) -> Tensor:
    """About what all keys weigh together, less the logarithm of how many, if planes are set by chance.

    worth `[..., planes]`, rest `[...]`: what planes are worth to a query, scaled, and what a key without any scores.
    The scores' sum is about a Gaussian's; past a few deviations there are no keys for it.
    """
    spread = worth.square().sum(-1).sqrt() / 2
    total = rest + worth.sum(-1) / 2 + torch.where(spread < 4, spread.square() / 2, 4 * spread - 8)
    return total if softcap is None else softcap * torch.tanh(total / softcap)


@dataclass(frozen=True)
class Sketcher:
    """How keys of each KV head become planes, and what planes are worth to a query.

    of: `[kv_heads, planes, d]`, start: `[kv_heads, planes]` float32: `of k - start` counts the steps of a plane's
    channel; half: `[kv_heads, planes]` float32, half the steps of the channel; bit: int32, which bit of the count.
    worth: `[kv_heads, planes, d]`: a plane that is set adds `worth . q` to a score; base: `[kv_heads, d]` float32: with
    no plane set it is `base . q`.
    axes: `[kv_heads, AXES]` int32: the lowest plane of each of the channels of most spread; -1: there are fewer.
    """

    of: Tensor
    start: Tensor
    half: Tensor
    bit: Tensor
    worth: Tensor
    base: Tensor
    axes: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.of, self.start, self.half, self.bit, self.worth, self.base, self.axes

    @staticmethod
    def zeros(kv_heads: int, planes: int, d: int, dtype: torch.dtype, device: torch.device) -> Sketcher:
        """Under which every score is 0."""
        wide = torch.zeros(kv_heads, planes, d, dtype=dtype, device=device)
        flat = torch.zeros(kv_heads, planes, device=device)
        base, axes = torch.zeros(kv_heads, d, device=device), torch.full((kv_heads, AXES), -1, device=device)
        return Sketcher(wide, flat, flat.clone(), flat.int(), wide.clone(), base, axes.int())

    @staticmethod
    def bytes(kv_heads: int, planes: int, d: int, dtype: torch.dtype) -> int:
        return kv_heads * (2 * planes * d * dtype.itemsize + 3 * 4 * planes + 4 * d + 4 * AXES)

    def __getitem__(self, at: Any) -> Sketcher:
        return Sketcher(*(x[at] for x in self.tensors()))

    def copy_(self, other: Sketcher) -> None:
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(new)

    def encode(self, keys: Tensor) -> Tensor:
        """keys `[n, kv_heads, d]` -> `[n, kv_heads, planes / 32]` int32."""
        steps = torch.einsum("nhd,hpd->nhp", keys.float(), self.of.float()) - self.start
        count = (steps + self.half).floor().clamp_min(0).minimum(2 * self.half - 1).clamp_min(0).int()
        bits = (count >> self.bit & 1).view(*count.shape[:2], -1, WORD)
        # the sum of powers of two is the word, the highest bit its sign
        return (bits.long() << torch.arange(WORD, device=keys.device)).sum(-1).to(torch.int32)

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """q `[rows, kv_heads, group, d]` -> planes' worth `[..., planes]`, base `[...]`."""
        worth = torch.einsum("rhgd,hpd->rhgp", q.float(), self.worth.float())
        return worth, torch.einsum("rhgd,hd->rhg", q.float(), self.base)


class Sketched(NamedTuple):
    """Sketched keys of a step's sequences `seq` `[rows]`: kept `[blocks, kv_heads, block, words]` int32, of which table
    `[rows, blocks]` lists the first `tokens` `[rows]`. Lists are int32."""

    kept: Tensor
    table: Tensor
    tokens: Tensor
    sketcher: Sketcher
    seq: Tensor


def unpack(words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[..., planes / 32]` int32 -> `[..., planes]`, 0 or 1."""
    at = torch.arange(WORD, dtype=torch.int32, device=words.device)
    return (words[..., None] >> at & 1).flatten(-2).to(dtype)


class Spread(NamedTuple):
    """What a fit has to know of a layer's keys and queries: mean of keys `[kv_heads, d]`, their covariance and the mean
    of `q q^T`, `[kv_heads, d, d]`, on the host."""

    mean: Tensor
    cov: Tensor
    moment: Tensor


SPREADS = LayerFile("coattn-spread-1", "spread of keys", "coattn calibrate auto", Spread)


def spread_of(keys: Tensor, moment: Tensor | None) -> Spread:
    """Of keys `[n, kv_heads, d]`, a sample. moment: `[kv_heads, d, d]`, of any scale; None: it is not known."""
    x = keys.transpose(0, 1).double()
    mean = x.mean(1)
    x = x - mean[:, None]
    known = torch.eye(x.shape[-1]).expand(len(x), -1, -1) if moment is None else moment
    return Spread(mean.cpu(), (x.mT @ x / x.shape[1]).cpu(), known.cpu())


def _eigh(x: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh` of many small matrices, which it takes one after the other: here by threads."""
    parts = x.chunk(min(THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(len(parts)) as pool:
        solved = list(pool.map(torch.linalg.eigh, parts))
    values, vectors = (torch.cat(y) for y in zip(*solved, strict=True))
    return values, vectors


def fit(spread: Spread, planes: int) -> Sketcher:
    """The best tables for these keys and queries, of any number of heads."""
    mean, cov, cost = (x.double() for x in spread)
    d = mean.shape[-1]
    size = cost.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)
    values, axes = _eigh(cost + FLOOR * size[:, None, None] * torch.eye(d, dtype=cost.dtype))
    values = values.clamp_min(values[:, -1:] * 1e-12)
    root = (axes * values.sqrt()[:, None]) @ axes.mT
    inverse = (axes / values.sqrt()[:, None]) @ axes.mT
    variance, main = _eigh(root @ cov @ root)
    variance = variance.clamp_min(variance[:, -1:] * 1e-12).clamp_min(1e-30)
    bits, channel, bit = _deal(variance, planes)
    order = _order(variance.sqrt().gather(1, channel) * (1 << bit) * _steps(bits.gather(1, channel)))
    channel, bit = (x.gather(1, order).repeat_interleave(PAIR, 1) for x in (channel, bit))
    bit = bit + torch.arange(planes, device=bit.device) % PAIR
    known = _steps(bits) * variance.sqrt()
    to, back = main.mT @ root, inverse @ main
    per = channel[:, :, None].expand(-1, -1, d)
    step, half = known.gather(1, channel), (1 << bits.gather(1, channel)) / 2
    of = to.gather(1, per) / step[..., None]
    axis = back.mT.gather(1, per)
    worth = axis * (step * (1 << bit))[..., None]
    # the middle of a channel's lowest step
    lowest = torch.where(bits > 0, known * (0.5 - (1 << bits) / 2), 0.0)
    base = mean + torch.einsum("hdc,hc->hd", back, lowest)
    start = torch.einsum("hpd,hd->hp", of, mean)
    lowest_of = torch.full_like(bits, -1)
    lowest_of.scatter_reduce_(1, channel, torch.where(bit == 0, torch.arange(planes), -1), "amax")
    axes = lowest_of.flip(1)[:, :AXES]
    axes = torch.nn.functional.pad(axes, (0, AXES - axes.shape[1]), value=-1)
    return Sketcher(of.float(), start.float(), half.float(), bit.int(), worth.float(), base.float(), axes.int())


def _steps(bits: Tensor) -> Tensor:
    return torch.tensor(STEPS, dtype=torch.float64, device=bits.device)[bits]


def _order(worth: Tensor) -> Tensor:
    """What pairs of planes are worth on average, `[heads, pairs]` -> which pair stands where.

    A kernel counts pair i of a byte as 4^i in what it adds up, and of half a byte in the words that are left over: one
    of each quarter, where their number is odd. So the higher ones are for the pairs that are worth most.
    """
    pairs = worth.shape[1]
    place = torch.arange(pairs, device=worth.device)
    own = max(1, pairs * PAIR // (4 * WORD))
    left_over = (place * PAIR // WORD % own == own - 1) & bool(own % 2)
    high = torch.where(left_over, place % 2, place % 4)
    return worth.argsort(1).gather(1, high.argsort(stable=True).argsort().expand_as(worth))


def _deal(spread: Tensor, planes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Variances `[heads, d]` -> bits of each channel; of each pair of planes its channel and which bit the lower one
    is, `[heads, planes / 2]`.

    A pair more is worth less the more a channel has: the best ones of all are what one by one would be chosen.
    """
    gain = torch.tensor([a - b for a, b in pairwise(LEFT[::PAIR])], dtype=spread.dtype, device=spread.device)
    most = gain.numel()
    chosen = (spread[..., None] * gain).flatten(1).topk(planes // PAIR, dim=1).indices.sort(1).values
    channel, nth = chosen // most, chosen % most
    pairs = torch.zeros_like(spread, dtype=torch.long).scatter_add_(1, channel, torch.ones_like(channel))
    return PAIR * pairs, channel, PAIR * (pairs.gather(1, channel) - 1 - nth)
