"""A model with packed weights on a card that is too small for its KV cache: what `coattn plan` says, and what happens.

    python lab/scripts/capped.py [--shapes qwen3-32b:int4] [--context 131072] [--cap 24GiB] [--methods auto,cpu]
                                 [--chunk 2048] [--steps 24] [--fetched 20] [--device auto] [--out OUT.json]

GPU memory is capped once the random weights are there: an allocation beyond it fails. For each method a line: bytes
beside those of the plan, milliseconds of a decode step, seconds of a prompt of the whole context. Keys and values are
random numbers. Chunks of a prompt take longer the more is stored: four first ones and one at the end are read, and
the others are taken to lie on the line between them. The exit status is 1 where a method fails, or takes more
than the cap.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from coattn.cache.available import memory
from coattn.engine.runner.capture import GraphRunner
from coattn.hf.load import choose_device, choose_dtype
from coattn.hf.stored import bytes_of
from coattn.units import format_bytes, parse_bytes
from coattn_lab.bench import prefill
from coattn_lab.bench.decode import Bench, Case
from coattn_lab.bench.preset import drive_floor
from coattn_lab.bench.random_model import GROUP, config_of, random_model

FIRST_CHUNKS, WARM_STEPS = 4, 2
FORMS = {"int4": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}}
"""As config.json says it."""


def planned(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By method, the row of `coattn plan` for a card of the cap's size."""
    shapes, _, form = given.shapes.partition(":")
    config = config_of(shapes) | ({"quantization_config": FORMS[form]} if form else {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config))
        words = [sys.executable, "-m", "coattn", "plan", str(file), "--gpu", given.cap, "--chunk", str(given.chunk)]
        words += ["--dram", f"{memory()[0] >> 20}MiB", "--context", str(given.context), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return {row["method"]: row for row in json.loads(done.stdout)["methods"]}


def synchronise(device: torch.device) -> None:
    """Waits for the GPU where there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(model: Any, method: str, kv: int, given: argparse.Namespace) -> dict[str, Any]:
    """One method's figures. kv: its `gpu_kv`."""
    device, chunk = model.device, given.chunk
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    (first,) = prefill.run(model, [prefill.Case(method, kv, chunk)], FIRST_CHUNKS * chunk)
    if first.refused:
        raise RuntimeError(first.refused)
    driven = given.fetched if method == "auto" else None
    run = Bench(model, given.shapes, {}, kv, chunk + given.steps + WARM_STEPS + 1)
    ids = torch.randint(0, model.config.vocab_size, (chunk,)).tolist()
    with run.prepared(Case(method, 1, given.context, fetched=driven)) as ready:
        history, lasts = ready.length, []
        for again in (True, False):
            synchronise(device)
            start = time.perf_counter()
            ready.runner.extend(0, ids, history, True)
            synchronise(device)
            lasts.append(time.perf_counter() - start)
            if again:
                ready.runtime.truncate(0, history, 0)
        ready.length += chunk
        start = time.perf_counter()
        ready.step()
        first_step = time.perf_counter() - start
        if driven is not None:
            drive_floor(ready.runtime, ready.stepped, driven)
        steps = []
        for _ in range(WARM_STEPS + given.steps):
            start = time.perf_counter()
            ready.step()
            steps.append(time.perf_counter() - start)
        found = {
            "kv_bytes": ready.ledger.peak["gpu"],
            "host_kv_bytes": ready.ledger.peak["host"],
            "captured": isinstance(ready.runner, GraphRunner) and ready.runner.uncaptured is None,
        }
        if device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(device)
            found |= {"peak_bytes": torch.cuda.max_memory_reserved(device) + given.outside, "used": whole - free}
    # seconds of a chunk after h tokens: those at FIRST_CHUNKS' middle, and a slope
    near, far = first.seconds / FIRST_CHUNKS, lasts[-1]
    slope = (far - near) / max(1, history - (FIRST_CHUNKS - 1) * chunk / 2)
    ends = near - slope * (FIRST_CHUNKS - 1) * chunk / 2, far
    return found | {
        "step_ms": statistics.median(steps[WARM_STEPS:]) * 1e3,
        "first_step_s": first_step,
        "prompt_s": given.context / chunk * sum(ends) / 2,
        "chunk_s": {"first": near, "last": far},
    }


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    plan = row["plan"]
    said = f"{row['method']}: planned {format_bytes(plan['gpu'])}, {'fits' if plan['fits'] else 'does not fit'}"
    if "failed" in row:
        return f"{said}; {row['failed']}"
    peak = f"at most {format_bytes(row['peak_bytes'])} used" if "peak_bytes" in row else "no GPU"
    return (
        f"{said}; {peak}, of it {format_bytes(row['kv_bytes'])} of KV ({format_bytes(plan['kv'])} planned), "
        f"{format_bytes(row['host_kv_bytes'])} in DRAM; a step {row['step_ms']:.1f} ms"
        f"{', captured' if row['captured'] else ''}; a prompt {row['prompt_s']:.1f} s (chunks of "
        f"{row['chunk_s']['first'] * 1e3:.0f} to {row['chunk_s']['last'] * 1e3:.0f} ms)"
    )


def main() -> int:
    """Plans, makes the model, caps the memory, measures every method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="qwen3-32b:int4")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--cap", default="24GiB")
    parser.add_argument("--methods", default="auto,cpu")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--fetched", type=float, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cap, plan, device = parse_bytes(given.cap, "--cap") or 0, planned(given), choose_device(given.device)
    model = random_model(given.shapes, device, choose_dtype("auto", device))
    gc.collect()
    given.outside = 0
    if device.type == "cuda":
        model.to("cpu")  # what lay between them while they were drawn goes
        torch.cuda.empty_cache()
        model.to(device)
        free, whole = torch.cuda.mem_get_info(device)
        given.outside = whole - free - torch.cuda.memory_reserved(device)  # CUDA, and whoever else is on the card
        torch.cuda.set_per_process_memory_fraction((cap - given.outside) / whole, device)
    print(f"{given.shapes}, {given.context:,} tokens, {given.cap}; weights {format_bytes(bytes_of(model))}", flush=True)
    rows = []
    for method in given.methods.split(","):
        row: dict[str, Any] = {"method": method, "plan": plan[method], "weight_bytes": bytes_of(model)}
        try:
            row |= measured(model, method, plan[method]["kv"] + (1 << 20), given)
        except Exception as error:  # the others go on
            row["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        rows.append(row)
        print(line(row), flush=True)
        if given.out:
            given.out.write_text(json.dumps({"cap": cap, "context": given.context, "rows": rows}, indent=1) + "\n")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return int(any("failed" in row or row.get("used", 0) > cap for row in rows))


if __name__ == "__main__":
    sys.exit(main())
