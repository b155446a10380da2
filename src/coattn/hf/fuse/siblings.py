"""Projections of the same input as one matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from coattn.hf.fuse.forms import is_plain_linear, replaced
from coattn.hf.quantised.module import PackedLinear
from coattn.kernels.linear import linear
from coattn.kernels.quantise.weights import TENSORS, Packed, can_join, join_packed

NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)


class Siblings:
    """Linear modules over the same input: one matrix, one multiplication, whichever is called first.

    Their weights become views of one; `part` gives each a weight of its own again.
    """

    weight: Tensor | Packed

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = members
        self.sizes = [m.out_features for m in members]
        # weights outlive whoever records: they must not become tensors that only inference may touch
        with torch.inference_mode(False), torch.no_grad():
            packed = join_packed([m.packed for m in members]) if isinstance(members[0], PackedLinear) else None
            if packed is not None:
                self.weight, self.joined = packed, True
                self._give(packed)
            else:
                self.weight, self.joined = join([m.weight.data for m in members])
                for member, rows in zip(members, torch.split(self.weight, self.sizes), strict=True):
                    member.weight.data = rows
            self.bias = None if members[0].bias is None else join([m.bias.data for m in members])[0]
        self._last: tuple[Tensor, tuple[Tensor, ...]] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Each member returns its slice of the one product."""
        with ExitStack() as undo:
            for i, member in enumerate(self.members):
                undo.enter_context(replaced(member, self._slice(i)))
            yield
        self._last = None

    def part(self) -> None:
        """The members' weights become their own again."""
        with torch.inference_mode(False), torch.no_grad():
            for member in self.members if self.joined else ():
                for name in ("weight", *TENSORS):
                    if (own := member._parameters.get(name)) is not None:
                        own.data = own.data.clone(memory_format=torch.contiguous_format)

    def _give(self, packed: Packed) -> None:
        """Each member its rows of a packed matrix."""
        start = 0
        for member, n in zip(self.members, self.sizes, strict=True):
            for name, tensor in packed.between(start, start + n).tensors.items():
                member.get_parameter(name).data = tensor
            start += n

    def _slice(self, i: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if self._last is None or self._last[0] is not x:
                self._last = (x, torch.split(linear(x, self.weight, self.bias), self.sizes, -1))
            return self._last[1][i]

        return forward


def join(tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Tensors as one along the first axis, and whether memory was taken: those that lie without a gap stay there."""
    first = tensors[0]
    ends = [t.data_ptr() + t.nbytes for t in tensors]
    following = all(t.data_ptr() == end for t, end in zip(tensors[1:], ends, strict=False))
    one = len({t.untyped_storage().data_ptr() for t in tensors}) == 1 and all(t.is_contiguous() for t in tensors)
    if not (following and one):
        return torch.cat(list(tensors)), True
    size = (sum(len(t) for t in tensors), *first.shape[1:])
    return first.as_strided(size, first.stride(), first.storage_offset()), False


def projections(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> Iterator[list[Any]]:
    """Linear children of a module that have the same input, by their names. kind: their class."""
    for names in NAMES:
        members = [m for name in names if isinstance(m := getattr(module, name, None), kind)]
        if len(members) == len(names):
            yield members


def find_siblings(module: nn.Module) -> list[Siblings]:
    """Those among a module's children whose weights can be one matrix."""
    found = []
    for members in projections(module):
        kinds = {(m.in_features, m.bias is None, m.weight.dtype, m.weight.device) for m in members}
        if len(kinds) == 1 and all(map(is_plain_linear, members)):
            found.append(Siblings(members))
    for packed in projections(module, PackedLinear):
        staged = any(hasattr(p, "on_host") for m in packed for p in m.parameters())  # copied into each one's own memory
        alike = len({(m.in_features, m.bias is None, m.codes.device) for m in packed}) == 1
        if alike and not staged and all(map(is_plain_linear, packed)) and can_join([m.packed for m in packed]):
            found.append(Siblings(packed))
    return found
