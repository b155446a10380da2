"""Rows at equal GPU memory: each row's own size parameters, set so that its KV on the GPU is a given share of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coattn.cache.ledger import Ledger
from coattn.errors import CoattnError, ConfigError
from coattn.method.row import Composed, compose
from coattn.parts.executor.staging import Staging
from coattn.step.runtime import Runtime
from coattn.types import LayerShape
from coattn.units import ceil_div, format_bytes, parse_share
from coattn_lab.evaluate.tasks.row import Row

CLOSE = 0.1
"""By how much a row may miss its budget, of it, without a reason."""
Settings = dict[str, Any]
Params = Mapping[str, Any]


@dataclass(frozen=True)
class Size:
    """What rows are sized for: the model's layers, sequences at a time, tokens of the longest one."""

    layers: Sequence[LayerShape]
    batch: int
    tokens: int

    @property
    def whole(self) -> int:
        """KV bytes of all sequences at their longest, all in one place."""
        return self.batch * self.tokens * sum(layer.token_bytes for layer in self.layers)

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def on_gpu(self) -> bool:
        return self.layers[0].device.type == "cuda"


def needed(size: Size, composed: Composed) -> int:
    """GPU bytes that a row cannot do without while it decodes, of all sequences; takes none.

    Not counted: memory that blocks pass through on their way from DRAM, which takes what a budget leaves, but for its
    least; room for the one prompt that is being read.
    """
    with _opened(size, composed) as (runtime, ledger):
        found = ledger.held["gpu"] - reading_bytes(runtime)
        for group in runtime.groups:
            staging = group.executor.staging
            if staging is not None:
                found -= staging.blocks * staging.unit
            if staging is not None or (size.on_gpu and group.cache.config.host == "kv"):
                found += Staging.unit_bytes(group.cache.spec.layers, group.cache.block)
        return found


def _reading(size: Size, composed: Composed) -> int:
    with _opened(size, composed) as (runtime, _):
        return reading_bytes(runtime)


@contextmanager
def _opened(size: Size, composed: Composed) -> Iterator[tuple[Runtime, Ledger]]:
    """A row as an engine opens it, on a device without memory."""
    ghosts = [replace(shape, device=torch.device("meta"), mark=None) for shape in size.layers]
    ledger = Ledger()
    runtime = Runtime(ghosts, composed, ledger, size.batch, size.tokens, fixed=True, padding=size.on_gpu)
    try:
        yield runtime, ledger
    finally:
        runtime.release()


def reading_bytes(runtime: Runtime) -> int:
    """GPU bytes that are there for a prompt while it is read, and for nothing else."""
    total = 0
    for cache in (group.cache for group in runtime.groups if group.cache.config.gpu == "kept"):
        spec, memory = cache.spec, cache.gpu.memory
        stay = spec.seqs * ceil_div(spec.plan.kept_entries or spec.tokens or 1, cache.block) + spec.padding
        total += max(0, memory.capacity - stay) * (memory.block_bytes + memory.side_bytes)
    return total


@dataclass(frozen=True)
class Knob:
    """Settings by a number from 1 on: the larger it is, the more GPU memory they take. params: the row's own."""

    settings: Callable[[int, Size, Params], Settings]
    most: Callable[[Size, Params], int]


def _blocks(size: Size, params: Params) -> int:
    return ceil_div(size.tokens, int(params["block"]))


def _count(name: str) -> Knob:
    """A number of tokens."""
    return Knob(lambda n, _size, _params: {name: n}, lambda size, _params: size.tokens)


def _pool(n: int, _size: Size, params: Params) -> Settings:
    """So many blocks beside those that are always attended."""
    always = (params["window_blocks"] or 1) + params["sink_blocks"]
    return {"budget": params["block"] * (n + always)}


WINDOW = Knob(lambda n, _size, _params: {"window_blocks": n}, _blocks)
TWO_HALVES = Knob(lambda n, _size, _params: {"heavy": n, "recent": n}, lambda size, _params: size.tokens // 2)
COLUMNS = Knob(lambda n, size, _params: {"partial": round(n / size.head_dim, 4)}, lambda size, _params: size.head_dim)
POOL = Knob(_pool, _blocks)
SHARE_POOLED = Knob(lambda n, _size, _params: {"pool_share": n / 512}, lambda _size, _params: 512)


@dataclass(frozen=True)
class Sizing:
    """How a row is sized. knob: None where its GPU memory does not depend on a parameter; why: the reason.

    share: parameters that follow the budget as a share of the tokens, or as it is. codes: settings to try before the
    knob is turned, the best first; the first with which the row fits at all is taken.
    """

    knob: Knob | None = None
    why: str = ""
    share: Callable[[float, Size], Settings] = lambda _share, _size: {}
    codes: Callable[[Size], Iterator[Settings]] = lambda _size: iter([{}])


def _tokens(share: float, size: Size) -> int:
    return max(64, round(share * size.tokens))


def _cached(share: float, size: Size) -> int:
    """Of a cache on the GPU: the published 4,096 tokens, at most half of the budget, in blocks of 128."""
    return min(4096, int(share * size.tokens) // 2) // 128 * 128


def _groups(size: Size) -> Iterator[Settings]:
    """Codes of keys, the finest first: groups of 2, 4, 8 ... channels; small codebooks where few share them."""
    groups = size.head_dim // 2
    while groups:
        for centroids, bits in ((8192, 13), (1024, 12)):
            yield {"groups": groups, "centroids": centroids, "code_bits": bits}
        groups //= 2


def _planes(size: Size) -> Iterator[Settings]:
    """Bytes of a key's sketch: what `auto` takes by itself, then less."""
    yield {}
    code = size.head_dim // 4 - 4
    while code >= 4:
        yield {"code_bytes": code}
        code -= 4


KEEPS = "it keeps every token in GPU memory; the budget is what it reads"
SIZINGS: Mapping[str, Sizing] = {
    "full": Sizing(why="it keeps every token in GPU memory, and reads all"),
    "duo": Sizing(why="it keeps every token in GPU memory; its heads were labelled beforehand"),
    "quest": Sizing(why=KEEPS, share=lambda s, size: {"budget": _tokens(s, size)}),
    "snapkv": Sizing(why=KEEPS, share=lambda s, size: {"budget": _tokens(s, size)}),
    "oracle": Sizing(why=KEEPS, share=lambda s, size: {"budget": _tokens(s, size)}),
    "random": Sizing(why=KEEPS, share=lambda s, size: {"budget": _tokens(s, size)}),
    "offload": Sizing(WINDOW),
    "cpu": Sizing(WINDOW),
    "hgca": Sizing(WINDOW),
    "hgca-paper": Sizing(WINDOW),
    "pqcache": Sizing(WINDOW, share=lambda s, size: {"compress": round(s, 4), "cache_tokens": _cached(s, size)}),
    "auto": Sizing(SHARE_POOLED, codes=_planes),
    "infinigen": Sizing(COLUMNS, share=lambda s, size: {"budget": _tokens(s, size)}),
    "scout": Sizing(POOL),
    "scout-paper": Sizing(POOL),
    "hcattention": Sizing(WINDOW, codes=_groups),
    "hcattention-paper": Sizing(WINDOW, codes=_groups),
    "streaming": Sizing(_count("recent")),
    "h2o": Sizing(TWO_HALVES),
    "tova": Sizing(_count("cache_size")),
}
"""By row. A row that is not here is run as it is."""


@dataclass(frozen=True)
class Settled:
    """A row at a budget: as it is run, the share of all KV that it is planned to take, and why that is another."""

    row: Row
    planned: float
    why: str | None = None
    set: Settings = field(default_factory=dict)
    """Parameters that were set here."""


def settle(row: Row, share: float, size: Size) -> Settled:
    """A row whose GPU bytes meet `share` of all KV, by the parameters that its user left alone. Takes no memory."""
    sizing = SIZINGS.get(row.composed.method.name, Sizing(why="nobody has said which of its parameters is its size"))
    given = _given(row)
    budget = int(share * size.whole)
    if sizing.knob is None and not sizing.share(share, size):
        return Settled(row, needed(size, row.composed) / size.whole, sizing.why)
    own = {name: value for name, value in sizing.share(share, size).items() if name not in given}
    chosen, why = own, sizing.why or None
    if sizing.knob is not None:
        knob = sizing.knob.settings(1, size, row.composed.params)
        if given & knob.keys():
            why = f"{', '.join(sorted(given & knob.keys()))} was given"
        else:
            chosen, why = _turn(row.composed, sizing, own, given, budget, size)
    composed = _with(row.composed, chosen)
    planned = needed(size, composed) / size.whole
    if abs(planned / share - 1) <= CLOSE:
        why = None
    elif why is None:
        why = "its parts come in steps that are larger than a tenth of the budget"
    named = ",".join([row.name, *(f"{name}={value}" for name, value in chosen.items())])
    limit = share if sizing.knob is not None and row.gpu_share is None else row.gpu_share
    if limit is not None and row.gpu_share is None:
        named = f"{named},gpu_share={limit:g}"
    made = replace(
        row, name=named, composed=composed, gpu_share=limit, budget=share, why=why, asked=row.asked or row.name
    )
    return Settled(made, planned, why, chosen)


def _turn(
    composed: Composed, sizing: Sizing, own: Settings, given: set[str], budget: int, size: Size
) -> tuple[Settings, str | None]:
    """The largest setting that fits in a budget, over the best codes with which any does; else the smallest of all."""
    knob, params, tried = sizing.knob, composed.params, []
    assert knob is not None
    for found in sizing.codes(size):
        codes = {name: value for name, value in found.items() if name not in given}
        smallest = own | codes | knob.settings(1, size, params)
        least = _needed(composed, smallest, size)
        if least is None or least > budget:
            tried.append((least or size.whole, smallest))
            continue
        low, high = 1, max(1, knob.most(size, params))
        while low < high:
            middle = (low + high + 1) // 2
            taken = _needed(composed, own | codes | knob.settings(middle, size, params), size)
            low, high = (middle, high) if taken is not None and taken <= budget else (low, middle - 1)
        return own | codes | knob.settings(low, size, params), None
    least, smallest = min(tried, key=lambda each: each[0])
    return smallest, f"it cannot do with less than {least / size.whole:.1%} of the KV on the GPU"


def _needed(composed: Composed, settings: Settings, size: Size) -> int | None:
    try:
        return needed(size, _with(composed, settings))
    except CoattnError:  # settings that the row refuses, such as groups that do not divide the head size
        return None


def _with(composed: Composed, settings: Settings) -> Composed:
    return compose(composed.method, **{**composed.params, **settings}) if settings else composed


def _given(row: Row) -> set[str]:
    """Parameters that the user wrote."""
    return {word.partition("=")[0] for word in row.name.split(",")[1:]}


def parse_budgets(text: str) -> list[float | None]:
    """`6%,12.5%,1/4,own` -> shares of the KV; None: each row at its own size."""
    found: list[float | None] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word == "own":
            found.append(None)
            continue
        try:
            share = parse_share(str(float(word[:-1]) / 100) if word.endswith("%") else word, "--budget")
        except (ValueError, ConfigError):
            raise ConfigError(
                f"--budget has {word!r}, which is no share of the KV.", "Write budgets like 6%,12.5%,25%."
            ) from None
        assert share is not None
        found.append(share)
    if not found:
        raise ConfigError("--budget names no budget.", "Write budgets like 6%,12.5%,25%.")
    return list(dict.fromkeys(found))


def limit_of(composed: Composed, share: float | None, settled: bool, size: Size) -> int | None:
    """GPU bytes that an engine gets for a row: its share.

    A row that was sized gets never less than it cannot do without, and room for the prompt that is being read on top.
    """
    if share is None:
        return None
    asked = int(share * size.whole)
    return max(asked, needed(size, composed)) + _reading(size, composed) if settled else asked


def describe(settled: Settled, size: Size) -> str:
    """For people: what was set, and what it takes of a sequence."""
    taken = format_bytes(int(settled.planned * size.whole / size.batch))
    said = f"{settled.row.name}: {taken} of KV on the GPU a sequence ({settled.planned:.1%})"
    return said if settled.why is None else f"{said}; {settled.why}"
