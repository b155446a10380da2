"""HCAttention where full attention has no room: millions of tokens, and a long prompt read block by block."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from coattn import native
from coattn.bench.decode import Bench, Case, cap_for, layer_us, simulated, waiting
from coattn.types import Step

FORMS: dict[str, dict[str, Any]] = {
    "1m": {"context": 1 << 20, "groups": 32, "code_bits": 16, "values": "model"},
    "4m": {"context": 4 << 20, "groups": 32, "code_bits": 13, "values": "int4"},
}
"""The long rows: 12.5% of the KV in GPU memory; codes at 16 and 13 bits, values in DRAM in 16 and 4."""
KEPT = 0.065
"""Share of the far tokens that a KV head attends to: what SmolLM2 measured at tau 0.95."""


def measure(bench: Bench, name: str, form: dict[str, Any], kept: float, steps: int, seconds: float) -> dict[str, Any]:
    """One row. KV is filled directly: random codes and values."""
    from coattn.hf.architectures import describe_layers

    shape = describe_layers(bench.model)[0]
    params = {key: value for key, value in form.items() if key != "context"}
    context, cap = form["context"], cap_for(kept, form["context"], shape.q_heads // shape.kv_heads)
    case = Case("hcattention", 1, context, {**params, "tau": 1.0, "cap": cap, "centroids": 8192})
    start = time.perf_counter()
    with bench.prepared(case) as ready:
        bench.rest()
        ready.step()
        fill_s = time.perf_counter() - start
        taken: list[float] = []
        timings = []
        while len(taken) < 3 or (len(taken) < steps and sum(taken) < seconds):
            begin = time.perf_counter()
            ready.step()
            taken.append(time.perf_counter() - begin)
            timing = ready.runner.timing()
            if timing is not None:
                timings.append(timing)
        store: Any = ready.runtime.groups[-1].store
        near, far = ready.runtime.attended(Step.of((0,), (ready.length - 1,), (1,)))
        token = sum(each.token_bytes for each in ready.runtime.layers)
        entries = sum(store._taken.values()) * shape.kv_heads
        used = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] if bench.device.type == "cuda" else None
        row = {
            "row": name,
            "method": case.method,
            "shapes": bench.shapes,
            "batch": case.batch,
            "context": context,
            "params": dict(case.params),
            "settings": dict(bench.composed(case).params),
            "dtype": str(bench.model.dtype).removeprefix("torch."),
            "gpu_budget": bench.gpu_kv,
            "host_budget": bench.host_kv,
            "simulated": simulated(replace(case, kept=(kept,)), exact=False),
            "ms_per_step": statistics.median(taken) * 1e3,
            "tokens_per_s": case.batch / statistics.median(taken),
            "steps": len(taken),
            "kept_share": sum(store._taken.values()) / len(store._taken) / (context // store.block * store.block),
            "weight_bytes": bench.weights,
            "gpu_kv_bytes": ready.ledger.held["gpu"],
            "host_kv_bytes": ready.ledger.held["host"],
            "gpu_bytes_in_use": used,
            "full_kv_bytes": context * token,
            "fill_s": fill_s,
            "layer_us": layer_us(timings),
            **waiting(timings),
        }
        return row | _floor(
            bench, near * token, far * token, entries * 4 * (1 + shape.q_heads // shape.kv_heads), store
        )


def _floor(bench: Bench, near: int, far: int, lists: float, store: Any) -> dict[str, Any]:
    """The least time of each link. A layer's values are known when its scores are, so they follow each other."""
    row = store.stored.block_bytes / store.block / sum(s.kv_heads for s in store.opening.layers.values())
    piece = max(64, int(row) // 64 * 64)
    gather = native.random_gather_gbps(native.default_threads(), piece, 4 << 30)
    found: dict[str, Any] = {"dram_row_bytes": row, "dram_row_gather_gbps": gather, "values_bytes": far}
    if bench.limits["hbm_gbps"] is None:
        return found | {"floor_ms": None}
    hbm = (bench.weights + near) / bench.limits["hbm_gbps"] / 1e6
    pcie, dram = lists / bench.limits["pcie_gbps"] / 1e6, far / gather / 1e6
    return found | {"hbm_ms": hbm, "pcie_ms": pcie, "dram_ms": dram, "floor_ms": hbm + pcie + dram}


def prompt(model: Any, tokens: int, block: int, anchor: int, steps: int, params: dict[str, Any]) -> dict[str, Any]:
    """A prompt of random tokens through the engine, read block by block, and the answer's decode steps."""
    from coattn.engine.llm import LLM
    from coattn.engine.params import SamplingParams

    ids = torch.randint(0, model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    given = {"prefill_block": block, "anchor": anchor, **params}
    with LLM((model, None), "hcattention", max_batch=1, max_length=tokens + steps + 1, chunk=block, **given) as engine:
        engine.warm_up()
        times: list[float] = []
        start = time.perf_counter()
        for part in engine.stream(ids, SamplingParams(max_new_tokens=steps, ignore_eos=True)):
            if part.error is not None:
                raise part.error
            times.append(time.perf_counter())
        report = engine.report()
        timing = engine.runner.timing()
        attended = engine.engine.runner.runtime.groups[-1].store  # type: ignore[attr-defined]
        attended.attended(Step.of((0,), (tokens,), (1,)))
        taken = list(attended._taken.values())
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return {
        "tokens": tokens,
        "simulated": ["random weights", "random tokens", "picks by random weights"],
        "block": block,
        "anchor": anchor,
        "prefill_s": times[0] - start,
        "prefill_tokens_per_s": tokens / (times[0] - start),
        "ms_per_step": statistics.median(gaps[2:] or gaps) * 1e3,
        "steps": len(gaps),
        "kept_share": sum(taken) / len(taken) / tokens if taken else None,
        "layer_us_last_step": None if timing is None else layer_us([timing]),
        **report,
    }
