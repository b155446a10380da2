"""What lies where, as data: one class for each answer. `KVCache` does what they say."""

from dataclasses import dataclass
from typing import Any, ClassVar

from coattn.errors import ConfigError
from coattn.kernels.quantise.blocks import FORMS
from coattn.kernels.quantise.tokens import FORMS as TOKEN_FORMS
from coattn.kernels.quantise.values import FORMS as VALUE_FORMS
from coattn.part import Part, check_count

MAX_BLOCK_TOKENS = 1024
"""The largest block that the CPU's kernels take."""
BLOCK = "tokens per block"
WINDOW = "newest blocks of a sequence kept in GPU memory too; unset: most of the GPU budget, else 1"


@dataclass
class CacheConfig(Part):
    """What of the KV lies on the GPU, what in DRAM, in which blocks."""

    axis: ClassVar[str] = "cache"
    gpu: ClassVar[str]
    """`all`: every token; `recent`: the first and the most recent; `kept`: what maintenance keeps; `newest`: the newest
    blocks."""
    host: ClassVar[str | None] = None
    """`kv`: full blocks are written through; `v`: only their values; None: nothing."""

    block: int = 32
    """Tokens per block."""

    def __post_init__(self) -> None:
        check_count("block", self.block, 1, MAX_BLOCK_TOKENS if self.host else (1 << 31) - 1)

    def uncaptured(self) -> str | None:
        odd = self.host is not None and self.block & (self.block - 1)
        return f"block is {self.block}, which is no power of two" if odd else None


@dataclass
class OnGpu(CacheConfig):
    """Every token in GPU memory."""

    name = "gpu"
    gpu = "all"
    provides = frozenset({"gpu", "all_on_gpu", "all_tokens", "whole_kv"})
    help_text = {
        "block": BLOCK,
        "gpu_dtype": "numbers of keys and values in GPU memory: model (the model's own), int8 or int4 (53% or 28% of "
        "the bytes of bfloat16 at head size 128; no longer exact; under `full` alone)",
    }

    gpu_dtype: str = "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dtype(self.gpu_dtype, TOKEN_FORMS, "gpu_dtype")

    def is_exact(self) -> bool:
        return self.gpu_dtype == "model"

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"gpu_dtype": "model"}


@dataclass
class Recent(CacheConfig):
    """The first tokens and the most recent ones in GPU memory; the rest is gone."""

    name = "recent"
    gpu = "recent"
    provides = frozenset({"gpu"})
    help_text = {
        "block": BLOCK,
        "sinks": "first tokens that are kept for good",
        "recent": "most recent tokens kept; unset: what the GPU budget holds, or 1,024 with the sinks",
        "positions": "what distances go by: cache (positions counted inside it, as published), or text",
    }

    sinks: int = 64
    recent: int | None = None
    positions: str = "cache"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 1, unset=True)
        if self.positions not in ("cache", "text"):
            raise ConfigError(f"positions is {self.positions!r}, but must be cache or text.", "Leave it out for cache.")

    def is_exact(self) -> bool:
        return False

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"recent": tokens}


@dataclass
class Evicting(CacheConfig):
    """Every token of a prompt while it is read, in GPU memory; then what maintenance keeps, each KV head its own."""

    name = "evicting"
    gpu = "kept"
    provides = frozenset({"gpu", "evictable"})
    needs = frozenset({"evicts"})
    help_text = {"block": BLOCK}


@dataclass
class Tiered(CacheConfig):
    """Every full block in DRAM; the newest blocks, the filling one among them, in GPU memory."""

    name = "tiered"
    gpu = "newest"
    host = "kv"
    forms: ClassVar[tuple[str, ...]] = FORMS
    provides = frozenset({"gpu", "host", "all_tokens", "whole_kv"})
    help_text = {
        "block": BLOCK,
        "window_blocks": WINDOW,
        "host_dtype": "numbers of the blocks in DRAM: model (the model's own), or int8 (54% of the bytes of bfloat16 "
        "at block 32 and head size 128, more with smaller blocks; no longer exact; not where the GPU attends to whole "
        "blocks over PCIe, as in offload)",
    }

    window_blocks: int | None = None
    host_dtype: str = "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("window_blocks", self.window_blocks, 1, unset=True)
        check_dtype(self.host_dtype, self.forms)

    def is_exact(self) -> bool:
        return self.host_dtype == "model"

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"host_dtype": "model"}


@dataclass
class Values(Tiered):
    """Values of every full block in DRAM, their keys only in an index; the newest blocks in GPU memory as they are."""

    name = "values"
    host = "v"
    forms = VALUE_FORMS
    provides = frozenset({"gpu", "host", "host_values", "all_tokens"})
    needs = frozenset({"codes", "weighs"})
    help_text = {
        "block": BLOCK,
        "window_blocks": "newest blocks of a sequence kept as they are in GPU memory",
        "sink_blocks": "first blocks of a sequence kept as they are in GPU memory too; not in the paper",
        "host_dtype": "numbers of the values in DRAM: model (the model's own), int8 or int4",
    }

    window_blocks: int = 1
    sink_blocks: int = 0

    def __post_init__(self) -> None:
        check_count("window_blocks", self.window_blocks, 1)
        super().__post_init__()
        check_count("sink_blocks", self.sink_blocks, 0)


def check_dtype(given: object, known: tuple[str, ...], name: str = "host_dtype") -> None:
    """Raises ConfigError unless there is such a form of keys and values."""
    if given not in known:
        names = f"{', '.join(known[:-1])} or {known[-1]}"
        raise ConfigError(f"{name} is {given!r}, but must be {names}.", "Leave it out for the default.")
