"""Reading a prompt: how long it takes under each method and cap, and that what comes out is the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.engine.runner.capture import choose_runner
from coattn.errors import CoattnError
from coattn.hf.architectures import describe_layers
from coattn.hf.experts import weights_read
from coattn.hf.forward import Session
from coattn.hf.quantised.module import PackedLinear
from coattn.kernels.prompt.choice import draw, flaw
from coattn.kernels.prompt.kernels import KERNELS, Kernel
from coattn.kernels.prompt.mask import Mask, Shape
from coattn.kernels.prompt.warm import warm
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.step.runtime import Runtime

PEER = "transformers"
"""Plain Transformers with its default attention and its own cache; the prompt in one call."""


@dataclass(frozen=True)
class Case:
    """One row to be; the first of a run is what the others are compared with."""

    method: str
    gpu_kv: int | None
    chunk: int
    """Tokens per step."""
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One measured prompt."""

    method: str
    tokens: int
    chunk: int
    gpu_kv: int | None
    seconds: float
    tokens_per_s: float
    ratio: float
    """Its time as a multiple of the first row's."""
    kl: float
    """Divergence of the next token's distribution from that of the same model's first row."""
    same_top: bool
    """Whether the most likely next token is that row's."""
    gpu_kv_peak: int
    host_kv_peak: int
    floor_s: float | None = None
    """The products at the rate of a large product, and the attention at that of the fastest kernel."""
    floor_ratio: float | None = None
    refused: str | None = None
    """Why there are no figures."""


def run(
    model: Any, cases: list[Case], tokens: int, floor: float | None = None, than: float | None = None
) -> Iterator[Row]:
    """The same random prompt under each case. than: seconds of another model's first row, which ratios are of."""
    ids = torch.randint(0, model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    first: tuple[float, Tensor] | None = None
    for case in cases:
        ledger = Ledger(case.gpu_kv, None)
        try:
            seconds, logits = _plainly(model, ids) if case.method == PEER else _read(model, case, ledger, ids)
        except (CoattnError, torch.OutOfMemoryError) as error:
            said = " ".join(str(error).split())[:200]
            yield Row(case.method, tokens, case.chunk, case.gpu_kv, 0.0, 0.0, 0.0, 0.0, False, 0, 0, refused=said)
            continue
        first = first or (seconds, logits)
        own, plain = (x.double().log_softmax(-1) for x in (logits, first[1]))
        yield Row(
            case.method,
            tokens,
            case.chunk,
            case.gpu_kv,
            seconds,
            tokens / seconds,
            seconds / (than or first[0]),
            float((plain.exp() * (plain - own)).sum()),
            bool(own.argmax() == plain.argmax()),
            ledger.peak["gpu"],
            ledger.peak["host"],
            floor,
            None if floor is None else seconds / floor,
        )


def floor_s(model: Any, tokens: int) -> float:
    """The least time of a prompt: FLOPs of its products and of its attention, at rates measured here."""
    config, device, dtype = model.config, model.device, model.dtype
    products = product_tflops(device, dtype, config.hidden_size, config.intermediate_size)
    head = model.get_output_embeddings().weight
    numbers = (weights_read(model).of(1) - head.nbytes) / head.element_size()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            numbers += module.in_features * module.out_features - module.packed.nbytes / head.element_size()
    linear = 2 * tokens * numbers
    attention = 0.0
    for layer in describe_layers(model):
        mask = Mask(True, layer.sliding_window, 0, layer.softcap).over(tokens)
        shape = Shape(device, dtype, layer.q_heads, layer.kv_heads, layer.head_dim, tokens, tokens, mask)
        attention += flops(shape) / _fastest(shape)
    return float(linear / products / 1e12 + attention / 1e12)


def product_tflops(device: torch.device, dtype: torch.dtype, width: int, inner: int) -> float:
    """TFLOP/s of a large product `[rows, width] x [width, inner]`: the rate of a prompt's linear layers."""
    rows = 8192 if device.type == "cuda" else 512
    x, w = (torch.randn(size, device=device).to(dtype) for size in ((rows, width), (inner, width)))
    fastest = float("inf")
    for _ in range(5):
        _synchronise(device)
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        _synchronise(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * rows * width * inner / fastest / 1e12


def _fastest(shape: Shape) -> float:
    """TFLOP/s of the fastest kernel for a chunk of a long prompt."""
    on_gpu = shape.device.type == "cuda"
    chunk = replace(shape, tokens=8192 if on_gpu else 512, keys=16384 if on_gpu else 512, mask=Mask(not on_gpu))
    plain = chunk if shape.mask.plain else replace(chunk, mask=shape.mask.over(chunk.keys))
    right = [kernel for kernel in KERNELS[:-1] if flaw(kernel, plain) is None]
    return max(tflops(kernel, plain) for kernel in right or KERNELS[-1:])


def tflops(kernel: Kernel, shape: Shape) -> float:
    """The rate of one kernel: the fastest of three runs, after one to warm up."""
    given, fastest = draw(shape), float("inf")
    for _ in range(4):
        _synchronise(shape.device)
        start = time.perf_counter()
        kernel.run(*given, shape.head_dim**-0.5, shape.mask)
        _synchronise(shape.device)
        fastest = min(fastest, time.perf_counter() - start)
    return flops(shape) / fastest / 1e12


def flops(shape: Shape) -> int:
    """Of the two products."""
    return 4 * pairs(shape) * shape.q_heads * shape.head_dim


def pairs(shape: Shape) -> int:
    """Pairs of a query and a key that it sees."""
    if not shape.mask.causal:
        return shape.tokens * shape.keys
    before, window = shape.keys - shape.tokens, shape.mask.window
    most = shape.keys if window is None else min(shape.keys, window + shape.mask.sinks)
    if before >= most:
        return shape.tokens * most
    growing = min(shape.tokens, most - before)
    return growing * before + growing * (growing + 1) // 2 + (shape.tokens - growing) * most


def _plainly(model: Any, ids: list[int]) -> tuple[float, Tensor]:
    prompt = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        model(prompt[:, : min(len(ids), 2048)], use_cache=True, logits_to_keep=1)
        _synchronise(model.device)
        start = time.perf_counter()
        logits = model(prompt, use_cache=True, logits_to_keep=1).logits
        _synchronise(model.device)
    return time.perf_counter() - start, logits[0, -1].float().cpu()


def _read(model: Any, case: Case, ledger: Ledger, ids: list[int]) -> tuple[float, Tensor]:
    chunk = case.chunk
    composed = compose(find_method(case.method), **case.params)
    with ExitStack() as undo:
        session = undo.enter_context(Session(model))
        runtime = Runtime(session.layers, composed, ledger, 1, len(ids) + 32, fixed=True, states=session.states)
        undo.callback(runtime.release)
        runner = choose_runner(session, runtime, 1)
        undo.callback(runner.close)
        # kernels are chosen and compiled, memory is taken and codebooks are made: not what is measured
        warm(session.layers, len(ids), [chunk, len(ids) % chunk or chunk])
        first = min(2 * chunk, len(ids))
        for history in range(0, first, chunk):
            runner.extend(0, ids[history : min(history + chunk, first)], history, history + chunk >= first)
        runner.runtime.truncate(0, first, 0)
        _synchronise(session.device)
        start = time.perf_counter()
        logits = None
        for history in range(0, len(ids), chunk):
            logits = runner.extend(0, ids[history : history + chunk], history, history + chunk >= len(ids))
        _synchronise(session.device)
        taken = time.perf_counter() - start
        assert logits is not None
        return taken, logits[0].float().cpu()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
