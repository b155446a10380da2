"""What each method takes for a model's shapes, a length and a batch: bytes of each tier, and how long it runs.

Bytes are those that the parts count (`tests/tools/plan` holds them against the ledger). Times are bytes over rates
times what steps on an H200 took more, and products over rates: a forecast, held against measurements in
docs/plan.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from coattn.errors import ConfigError
from coattn.tools.plan.known import Card
from coattn.tools.plan.shape import ModelShape
from coattn.units import ceil_div

BLOCK = 32
STATE_ROWS = 2
"""Of a sequence, in layers with a state."""
KEPT_STATES, KEPT_SHARE = 32, 0.25
"""States in DRAM besides one for each sequence, as `cache/states.py` keeps them; most of DRAM that they take."""
CHUNK = 8192
"""Tokens of a prompt that a GPU reads at once."""
WINDOW_TOKENS = {"offload": BLOCK, "cpu": BLOCK, "hgca": 1024 + BLOCK, "hcattention": 4 * BLOCK, "auto": 5 * BLOCK}
SCOUT_BUDGET = 2048
POOL_TOKENS, POOL_SHARE, POOL_MARGIN = 16384, 0.5, 0.9
"""Of `auto`: most tokens of a pool; its share of a sequence where there is room; its share of what room is left."""
FRESH, AXES = 1024, 32
CENTROIDS = 8192

DRAM_SHARE = {"offload": 1.0, "cpu": 1.0, "hgca": 0.1, "scout": 0.2, "hcattention": 0.124, "auto": 0.0075}
"""Of what a step attends to in DRAM. `hgca`, `scout`, `hcattention` and `auto`: as measured on texts
(docs/methods); they depend on the text. Of `scout`: of its budget; of `auto`: of 1,840 entries a KV head."""
AUTO_ENTRIES = 1840
OVER_FLOOR, LAYER_S, TIERED_LAYER_S = 1.2, {"full": 25e-6, "auto": 80e-6}, 40e-6
"""A step over its floor: a factor, and seconds a layer."""
PRODUCTS = 0.58
"""Of a card's rate, what reading a prompt reaches."""
PROMPT_FACTOR = {"full": 1.0, "auto": 1.1, "scout": 1.2, "hcattention": 1.27}
"""Time of a prompt under a method, over that under `full`."""
RESERVED = 700 << 20
"""GPU memory that CUDA, its libraries and captured steps take."""
EXACT = ("full", "offload", "cpu")
"""Other rows are lossy: what they lose depends on the text (docs/choosing.md)."""
AHEAD = ("scout",)
"""Rows that predict queries one layer ahead, which hybrid models do not run."""
GPU_DTYPES = {"full": 0, "full,gpu_dtype=int8": 8, "full,gpu_dtype=int4": 4}
"""Rows that keep every token in GPU memory, and the bits of its numbers; 0: the model's own."""
METHODS = (*GPU_DTYPES, "auto", "cpu", "offload", "scout", "hcattention", "hgca")


@dataclass(frozen=True)
class Machine:
    """Where a plan is to run. dram: bytes that there are; its rate in bytes a second is that of all cores reading."""

    card: Card
    dram: int | None
    dram_rate: float
    weights_on_gpu: float = 1.0
    chunk: int = CHUNK


class Estimate(NamedTuple):
    """A method over a model, for so many sequences of so many tokens."""

    method: str
    weights: int
    """In GPU memory."""
    kv: int
    """KV, indexes, pools and staging in GPU memory: what `gpu_kv` should be."""
    workspace: int
    """GPU memory that reading a prompt and CUDA take besides."""
    dram: int
    first_token_s: float | None
    step_s: float | None
    """None: not forecast, because the settings are not the row's own."""
    exact: bool
    fits_gpu: bool
    fits_dram: bool

    @property
    def gpu(self) -> int:
        return self.weights + self.kv + self.workspace

    @property
    def fits(self) -> bool:
        return self.fits_gpu and self.fits_dram

    @property
    def quality(self) -> str:
        return "exact" if self.exact else "near exact" if self.method == "auto" else "lossy"

    def as_dict(self) -> dict[str, Any]:
        """Its fields, and what follows from them."""
        return {**self._asdict(), "gpu": self.gpu, "fits": self.fits, "quality": self.quality}


def estimate(
    method: str,
    model: ModelShape,
    batch: int,
    tokens: int,
    machine: Machine,
    counted: tuple[int, int] | None = None,
    exact: bool | None = None,
) -> Estimate:
    """batch sequences of `tokens` each, prompt and answer.

    counted: bytes of KV memory of each tier, and whether it is exact, of a row with other settings than its own.
    """
    tables = 1 if model.config.get("tie_word_embeddings", False) else 2
    table = int(model.config["vocab_size"]) * model.hidden * model.item_bytes
    layers = round(max(0.0, model.weight_bytes - table * tables))  # without embedding and head
    weights = model.weight_bytes - layers + round(machine.weights_on_gpu * layers)
    moved = model.weight_bytes - weights
    widths = 3 * model.largest + 4 * model.hidden + 2 * (model.q_heads + 2 * model.kv_heads) * model.head_dim
    activations = min(tokens, machine.chunk) * model.item_bytes * widths  # while a chunk of a prompt is in a layer
    workspace = RESERVED * machine.card.count + activations
    if model.packed:  # numbers of one matrix: gate and up together
        workspace += 2 * model.largest * model.hidden * model.item_bytes
    states = STATE_ROWS * batch * model.state_bytes
    kv, dram = counted or held(method, model, batch, tokens, machine.card.memory - weights - workspace - states)
    kv += states
    dram += kept_states(model, batch, machine)
    return Estimate(
        method,
        weights,
        kv,
        workspace,
        dram + moved,
        None if counted else prompt_seconds(method, model, tokens, machine, moved),
        None if counted else step_seconds(method, model, batch, tokens, machine, moved),
        method in EXACT if exact is None else exact,
        weights + kv + workspace <= machine.card.memory,
        machine.dram is None or dram + moved <= machine.dram,
    )


def kept_states(model: ModelShape, batch: int, machine: Machine) -> int:
    """DRAM for states of sequences that do not run: of those that go on later, and of stored beginnings of prompts."""
    if not model.state_bytes:
        return 0
    room = math.inf if machine.dram is None else KEPT_SHARE * machine.dram // model.state_bytes
    return int(min(batch + KEPT_STATES, room)) * model.state_bytes


def count(
    method: str, settings: Mapping[str, Any], model: ModelShape, batch: int, tokens: int, machine: Machine
) -> Estimate:
    """A row with any settings, counted by the cache's own ledger on a device without memory. No time is forecast."""
    import torch

    from coattn.engine.plan import kv
    from coattn.method.row import compose
    from coattn.method.table import find_method
    from coattn.types import LayerShape

    composed = compose(find_method(method), **settings)
    blocks = batch * ceil_div(tokens, composed.params["block"])
    if blocks > kv.MOST_BLOCKS:
        raise ConfigError(
            f"{batch:,} x {tokens:,} tokens are {blocks:,} blocks, but a plan can be of {kv.MOST_BLOCKS:,} at most.",
            "Plan fewer sequences or a shorter context: the bytes grow in proportion.",
        )
    dtype = {4: torch.float32, 2: torch.bfloat16}[model.item_bytes]
    nowhere = torch.device("meta")
    layers = [LayerShape(model.q_heads, model.kv_heads, model.head_dim, dtype, nowhere, w) for w in model.windows]
    found, parts = kv.held(layers, composed, batch, tokens), composed.build()
    # executors that fetch count their staging; for the others a prompt's is made on a GPU alone
    staged = 0 if parts.config.host is None or "pull" in parts.executor.provides else staging(model, tokens)
    tiers = found["gpu"] + staged, found["host"]
    return estimate(composed.method.name, model, batch, tokens, machine, tiers, composed.exact)


def longest(method: str, model: ModelShape, batch: int, machine: Machine, most: int) -> int:
    """Tokens of the longest sequences that fit, at most `most`; 0: none do."""
    if estimate(method, model, batch, most, machine).fits:
        return most
    low, high = 0, most
    while high - low > BLOCK:
        middle = (low + high) // 2
        low, high = (middle, high) if estimate(method, model, batch, middle, machine).fits else (low, middle)
    return low


def held(method: str, model: ModelShape, batch: int, tokens: int, room: float = math.inf) -> tuple[int, int]:
    """Bytes of KV memory in the GPU tier, staging of prompts included, and in DRAM.

    room: what there is of GPU memory, to which a pool is cut down.
    """
    blocks = ceil_div(max(1, tokens), BLOCK)
    stored, row = blocks * BLOCK, model.token_bytes
    windows = batch * row * sum(min(stored, window) for window in model.windows if window is not None)
    if method in GPU_DTYPES:
        return windows + batch * model.full_layers * stored * row_bytes(method, model), 0
    staged = staging(model, tokens)
    if method == "auto":
        own, dram = _auto(model, batch, stored, (room - windows - staged) / max(1, model.full_layers))
    else:
        own, dram = _PARTS[method](model, batch, stored)
    return windows + model.full_layers * own + staged, model.full_layers * dram


def staging(model: ModelShape, tokens: int) -> int:
    """GPU memory through which a prompt's tokens come back from DRAM: two halves, each of one layer of one sequence."""
    return 2 * ceil_div(max(1, tokens), BLOCK) * BLOCK * model.token_bytes if model.full_layers else 0


def row_bytes(method: str, model: ModelShape) -> int:
    """Of keys and values of a token in one layer, as a row of `GPU_DTYPES` keeps them."""
    bits = GPU_DTYPES.get(method, 0)
    return 2 * model.kv_heads * (model.head_dim * bits // 8 + 8) if bits else model.token_bytes


def _exact(model: ModelShape, batch: int, stored: int) -> tuple[int, int]:
    return batch * min(WINDOW_TOKENS["cpu"], stored) * model.token_bytes, batch * stored * model.token_bytes


def _hgca(model: ModelShape, batch: int, stored: int) -> tuple[int, int]:
    window = min(WINDOW_TOKENS["hgca"], stored)
    lists = round(DRAM_SHARE["hgca"] * stored)
    return (
        batch * window * (model.token_bytes + 4 * model.kv_heads),
        batch * (stored + lists) * model.token_bytes,
    )


def _scout(model: ModelShape, batch: int, stored: int) -> tuple[int, int]:
    return (
        batch * (min(SCOUT_BUDGET, stored) + stored // BLOCK) * model.token_bytes,
        batch * stored * model.token_bytes,
    )


def _hcattention(model: ModelShape, batch: int, stored: int) -> tuple[int, int]:
    codes = stored * model.kv_heads * model.head_dim  # 16 bits for two channels
    book = CENTROIDS * 2 * model.item_bytes  # one for all pieces of two channels
    sums = 4 * (batch + 1) * model.kv_heads * (model.head_dim + 1)
    window = min(WINDOW_TOKENS["hcattention"], stored) * model.token_bytes
    return batch * (codes + window) + book + sums, batch * stored * model.token_bytes // 2


def pool_tokens(stored: int) -> int:
    """Of `auto`, where there is room."""
    return min(POOL_TOKENS, int(POOL_SHARE * stored))


def _auto(model: ModelShape, batch: int, stored: int, room: float) -> tuple[int, int]:
    """room: for one layer."""
    heads, d = model.kv_heads, model.head_dim
    planes, slots = 2 * d, batch + 1
    sketches = batch * stored * heads * planes // 8
    tables = heads * (2 * planes * d * model.item_bytes + 12 * planes + 4 * d + 4 * AXES)
    sums = 4 * slots * heads * (AXES * (d + 2) + 2 * d + 1)
    books = slots * heads * (4 * stored + 8 * FRESH + 16) + 264 * slots * model.q_heads
    rows = slots * heads * (8 * d + 8)
    window = batch * WINDOW_TOKENS["auto"] * model.token_bytes
    fixed = sketches + tables + sums + books + rows + window
    place = batch * heads * (2 * d + 6) + 8 * slots * heads
    places = pool_tokens(stored)
    if fixed + places * place > room:
        places = min(places, max(BLOCK, int(POOL_MARGIN * (room - fixed) / place)))
    return fixed + places * place, batch * stored * model.token_bytes


_PARTS: dict[str, Callable[[ModelShape, int, int], tuple[int, int]]] = {
    "offload": _exact,
    "cpu": _exact,
    "hgca": _hgca,
    "scout": _scout,
    "hcattention": _hcattention,
}


def step_seconds(method: str, model: ModelShape, batch: int, tokens: int, machine: Machine, moved: int) -> float:
    """Of a decode step of all sequences, each with so many tokens stored.

    moved: bytes of weights that every step brings in from DRAM.
    """
    row, full = batch * model.token_bytes, model.full_layers
    windows = row * sum(min(tokens, window) for window in model.windows if window is not None)
    near: float = batch * row_bytes(method, model) * full * min(tokens, WINDOW_TOKENS.get(method, tokens))
    cpu = pcie = 0.0
    if method == "scout":
        near = row * full * (min(tokens, SCOUT_BUDGET) + tokens // BLOCK)
        cpu = row * full * DRAM_SHARE["scout"] * min(tokens, SCOUT_BUDGET)
    elif method == "hcattention":
        near += row * full * tokens / 4
        cpu = row * full * tokens * DRAM_SHARE["hcattention"] / 2
    elif method == "auto":
        near += row * full * (tokens / 16 + min(4096, pool_tokens(tokens)) / 2)
        pcie = row * full * DRAM_SHARE["auto"] * min(tokens, AUTO_ENTRIES)
    elif method == "offload":
        pcie = row * full * tokens
    elif method not in GPU_DTYPES:
        cpu = row * full * tokens * DRAM_SHARE[method]
    over_layers = LAYER_S.get(method.partition(",")[0], TIERED_LAYER_S) * model.layers
    states = 2 * batch * model.state_bytes  # read and written
    own = OVER_FLOOR * (model.read_bytes(batch) + windows + near + states) / machine.card.hbm + over_layers
    beside = cpu / machine.dram_rate
    over = pcie / machine.card.pcie
    # scout's CPU works a layer ahead; the others' work beside the GPU's own part of the layer
    whole = max(own, beside) if method == "scout" else own + beside + over
    return max(whole, moved / machine.card.pcie)


def prompt_seconds(method: str, model: ModelShape, tokens: int, machine: Machine, moved: int) -> float:
    """Until the first token of one prompt of so many tokens."""
    seen = sum(tokens * tokens / 2 if window is None else tokens * min(window, tokens) for window in model.windows)
    products = 2 * model.active_params * tokens + 4 * seen * model.q_heads * model.head_dim
    chunks = ceil_div(tokens, machine.chunk)
    seconds = PROMPT_FACTOR.get(method.partition(",")[0], 1.05) * products / (PRODUCTS * machine.card.flops)
    over = 0.0
    if method not in GPU_DTYPES:  # what lies in DRAM comes back for every later chunk
        over = model.full_layers * model.token_bytes * tokens * (chunks - 1) / 2 / machine.card.pcie
    return max(seconds, over) + chunks * moved / machine.card.pcie
