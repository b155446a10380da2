"""Which method runs where none is named: exact in GPU memory where the KV fits there."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coattn.errors import UnknownNameError
from coattn.method.row import Composed, Method, compose
from coattn.method.table import METHODS, find_method
from coattn.types import LayerShape
from coattn.units import format_bytes

log = logging.getLogger("coattn")


class Wanted(NamedTuple):
    """The method that was named, or those that may be chosen once the model is known."""

    named: Composed | None
    rows: Sequence[Method]
    params: Mapping[str, Any]

    @staticmethod
    def of(method: str | Method | None, params: Mapping[str, Any]) -> Wanted:
        """Raises what is wrong with a method or its parameters."""
        if method is None:
            return Wanted(None, candidates(params), params)
        return Wanted(compose(find_method(method), **params), (), params)

    def resolve(self, layers: Sequence[LayerShape], gpu: int | None, batch: int, tokens: int) -> Composed:
        """The method for so many sequences of so many tokens; says which it is, and why, where none was named.

        gpu: bytes that the KV may take in the GPU tier.
        """
        if self.named is not None:
            return self.named
        row, why = choose(self.rows, layers, gpu, batch, tokens)
        log.log(logging.WARNING if row.name != "full" else logging.INFO, "Method %s: %s.", row.name, why)
        return compose(row, **self.params)


def kv_bytes(layers: Sequence[LayerShape], batch: int, tokens: int) -> int:
    """Of full attention; layers with a window of their own hold no more than it."""
    return batch * sum(
        shape.token_bytes * (tokens if shape.sliding_window is None else min(tokens, shape.sliding_window))
        for shape in layers
    )


def candidates(params: Mapping[str, Any]) -> list[Method]:
    """Of the methods that may be chosen, those that know these parameters. Raises what is wrong where none does."""
    rows = [(METHODS[name], compose(METHODS[name]).params.keys()) for name in ("full", "auto")]
    known = [row for row, names in rows if params.keys() <= names]
    if not known:
        every = set[str]().union(*(names for _, names in rows))
        raise UnknownNameError("methods 'full' and 'auto'", params.keys() - every or params.keys(), every)
    compose(known[0], **params)
    return known


def choose(
    rows: Sequence[Method], layers: Sequence[LayerShape], gpu: int | None, batch: int, tokens: int
) -> tuple[Method, str]:
    """Of candidates, the method for so many sequences of so many tokens, and why.

    gpu: bytes that the KV may take in the GPU tier. Without a GPU that tier is ordinary memory: nothing is gained by
    leaving it, so all is kept there and attended exactly.
    """
    if len(rows) == 1:
        return rows[0], "its parameters are given"
    if all(shape.device.type == "cpu" for shape in layers):
        return METHODS["full"], "there is no GPU"
    need = kv_bytes(layers, batch, tokens)
    amount = f"{batch:,} x {tokens:,} tokens are {format_bytes(need)} of KV"
    if gpu is None or need <= gpu:
        return METHODS["full"], f"{amount}, which fits in GPU memory"
    return METHODS["auto"], f"{amount}, but the GPU tier has {format_bytes(gpu)}"
