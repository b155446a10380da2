"""HCAttention where full attention has no room: millions of tokens, and a long prompt read block by block."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from coattn import native
from coattn.types import Step
from coattn_lab.bench.decode import Bench, Case, cap_for, layer_us, simulated, waiting

FORMS: dict[str, dict[str, Any]] = {
    "1m": {"context": 1 << 20, "groups": 32, "code_bits": 16, "host_dtype": "model"},
    "4m": {"context": 4 << 20, "groups": 32, "code_bits": 13, "host_dtype": "int4"},
}
"""The long rows: 12.5% of the KV in GPU memory; codes at 16 and 13 bits, values in DRAM in 16 and 4."""
KEPT = 0.065
"""Share of the tokens in DRAM that a KV head attends to: what SmolLM2 measured at tau 0.95."""


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
        last, cache = Step.of((0,), (ready.length - 1,), (1,)), ready.runtime.groups[-1].cache
        gpu, host = ready.runtime.attended(last)
        said, host_token = ready.runtime.report(last), ready.runtime.token_bytes()[1]
        token = sum(each.token_bytes for each in ready.runtime.layers)
        entries = said["row_entries"] * shape.kv_heads * len(ready.runtime.layers)
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
            "kept_share": said["row_entries"] / (context // cache.block * cache.block),
            "weight_bytes": bench.weights,
            "gpu_kv_bytes": ready.ledger.held["gpu"],
            "host_kv_bytes": ready.ledger.held["host"],
            "gpu_bytes_in_use": used,
            "full_kv_bytes": context * token,
            "fill_s": fill_s,
            "layer_us": layer_us(timings),
            **waiting(timings),
        }
        lists = entries * 4 * (1 + shape.q_heads // shape.kv_heads)
        row_bytes = host_token / sum(s.kv_heads for s in ready.runtime.layers)
        return row | _floor(bench, gpu * token, host * host_token, lists, row_bytes)


def _floor(bench: Bench, gpu: int, host: int, lists: float, row: float) -> dict[str, Any]:
    """The least time of each link. A layer's values are known when its scores are, so they follow each other."""
    piece = max(64, int(row) // 64 * 64)
    gather = native.random_gather_gbps(native.default_threads(), piece, 4 << 30)
    found: dict[str, Any] = {"dram_row_bytes": row, "dram_row_gather_gbps": gather, "values_bytes": host}
    if bench.limits["hbm_gbps"] is None:
        return found | {"floor_ms": None}
    hbm = (bench.weights + gpu) / bench.limits["hbm_gbps"] / 1e6
    pcie, dram = lists / bench.limits["pcie_gbps"] / 1e6, host / gather / 1e6
    return found | {"hbm_ms": hbm, "pcie_ms": pcie, "dram_ms": dram, "floor_ms": hbm + pcie + dram}


def prompt(model: Any, tokens: int, block: int, anchor: int, steps: int, params: dict[str, Any]) -> dict[str, Any]:
    """A prompt of random tokens through the engine, read block by block, and the answer's decode steps."""
    from coattn.engine.llm import LLM
    from coattn.engine.sampling.params import SamplingParams

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
        said = engine.engine.runner.runtime.report(Step.of((0,), (tokens,), (1,)))
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
        "kept_share": said.get("kept_mean"),
        "layer_us_last_step": None if timing is None else layer_us([timing]),
        **report,
    }
