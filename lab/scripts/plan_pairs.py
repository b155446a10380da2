"""Holds what `coattn plan` says of a model, a method and a length against what an engine then takes on this machine.

    python lab/scripts/plan_pairs.py OUT.json [MODEL:METHOD:BATCH:TOKENS...] [--seconds 200]

MODEL is a name of `coattn plan --list`, METHOD a row, TOKENS what each sequence holds, prompt and answer; left out, ten
pairs for an H200 with 125 GB of DRAM. The weights are random. Each figure stands beside its plan: GPU memory as the
driver counts it, the KV of it, DRAM, seconds to the first token and of a decode step. A row passes with bytes within
15% and times within 30%. No pair begins after so many seconds. A pair that fails has a line; OUT.json has every row
so far.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from coattn import LLM, SamplingParams
from coattn.errors import BudgetError
from coattn.hf.load import choose_device
from coattn.hf.stored import weight_bytes
from coattn.native import default_threads
from coattn.units import format_bytes
from coattn_lab.bench.core_limits import random_gather_gbps
from coattn_lab.bench.random_model import random_model

PAIRS = """Qwen2.5-1.5B-Instruct:full:4:32768 Qwen2.5-1.5B-Instruct:auto:1:32768 Qwen2.5-1.5B-Instruct:streaming:4:16384
Llama-3.1-8B-Instruct:full:1:32768 Llama-3.1-8B-Instruct:auto:4:32768 Llama-3.1-8B-Instruct:scout:4:32768
Qwen3-8B:hgca:1:16384 Qwen3-8B:offload:1:16384 Qwen3-8B:cpu:1:8192 Qwen3-14B:hcattention:1:16384"""
NEW_TOKENS = 40
WITHIN = {"gpu": 0.15, "kv": 0.15, "dram": 0.15, "first_token_s": 0.3, "step_s": 0.3}
NEVER_RATED = 1 << 20
"""Fewer bytes than these need not agree."""


def planned(model: str, method: str, batch: int, tokens: int, gbps: float) -> dict[str, Any]:
    """The row of `coattn plan`; of a method outside its table the one of `--method`, which has no times."""
    words = [sys.executable, "-m", "coattn", "plan", model, "--context", str(tokens), "--batch", str(batch)]
    words += ["--dram-speed", f"{gbps:.1f}", "--json"]
    rows: list[dict[str, Any]] = []
    for more in ([], ["--method", method]):
        done = subprocess.run(words + more, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        rows += [row for row in json.loads(done.stdout)["methods"] if row["method"] == method]
        if rows:
            break
    return rows[0]


def measured(model: Any, method: str, batch: int, tokens: int, kv: int | None, before: int) -> dict[str, Any]:
    """The same of an engine. kv: its `gpu_kv`; before: bytes of the GPU that were taken before this process began."""
    draws, size = torch.Generator().manual_seed(0), (batch + 2, tokens - NEW_TOKENS)
    first, second, *prompts = torch.randint(0, model.config.vocab_size, size, generator=draws).tolist()
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0)
    with LLM((model, None), method, gpu_kv=kv, max_batch=batch, max_length=tokens, reuse=False, progress=False) as llm:
        llm.warm_up()
        llm.generate([first], sampling)  # kernels are chosen and compiled, keys are measured
        alone = llm.generate([second], sampling)[0]
        handles = [llm.submit(prompt, sampling) for prompt in prompts]
        while any(handle.new_tokens < 4 for handle in handles):
            llm.step()
        start, counts = time.perf_counter(), [handle.new_tokens for handle in handles]
        while not any(handle.done for handle in handles):
            llm.step()
        made = statistics.mean(handle.new_tokens - count for handle, count in zip(handles, counts, strict=True))
        seconds, report = time.perf_counter() - start, llm.report()
        free, whole = torch.cuda.mem_get_info() if model.device.type == "cuda" else (0, 0)
    return {
        "gpu": whole - free - before if whole else weight_bytes(model) + report["gpu_kv_peak"],
        "kv": report["gpu_kv_peak"],
        "dram": report["host_kv_peak"],
        "first_token_s": alone.first_token_s,
        "step_s": seconds / made,
        "captured": report["captured"],
    }


def compare(pair: str, loaded: dict[str, Any], gbps: float, before: int) -> dict[str, Any]:
    """A pair's row. loaded: the last model by its name, to be used again."""
    name, method, *sizes = pair.split(":")
    batch, tokens = map(int, sizes)
    plan = planned(name, method, batch, tokens, gbps)
    if name not in loaded:
        loaded.clear()
        gc.collect()
        loaded[name] = random_model(name, choose_device("auto"), torch.bfloat16)
        torch.cuda.empty_cache()
    kv, short = None if method == "full" else plan["kv"] + (1 << 20), None
    try:
        found = measured(loaded[name], method, batch, tokens, kv, before)
    except BudgetError as error:  # what plan says is too little: how much it takes is measured all the same
        short, found = str(error), measured(loaded[name], method, batch, tokens, None, before)
    rated = [x for x in WITHIN if plan[x] and (x.endswith("_s") or max(plan[x], found[x]) >= NEVER_RATED)]
    ratios = {x: found[x] / plan[x] for x in rated}
    wrong = [x for x, ratio in ratios.items() if abs(ratio - 1) > WITHIN[x]] + ["gpu_kv"] * (short is not None)
    return {"pair": pair, "plan": plan, "measured": found, "ratios": ratios, "wrong": wrong, "short": short}


HEAD = f"{'pair':40}" + "".join(f"{name:>{2 * 10 + 8}}" for name in WITHIN)


def line(row: dict[str, Any]) -> str:
    """A row for people: of each figure what was measured, what was planned, and their ratio."""
    cells = []
    for name in WITHIN if "ratios" in row else ():
        time_s, both = name.endswith("_s"), (row["measured"][name], row["plan"][name])
        each = ("-" if x is None else f"{1e3 * x:.1f} ms" if time_s else format_bytes(x) for x in both)
        ratio = f"x{row['ratios'][name]:.2f}" if name in row["ratios"] else ""
        cells.append("".join(f"{x:>10}" for x in each) + f"{ratio:>8}")
    verdict = f"off: {', '.join(row['wrong'])}" if row["wrong"] else "pass"
    return f"{row['pair']:40}{''.join(cells)}  {verdict} {row['short'] or ''}"


def main() -> int:
    """Runs the pairs in order until time is up; the exit status is 1 where one does not pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("pairs", nargs="*", default=PAIRS.split())
    parser.add_argument("--seconds", type=float, default=200)
    given, before, start = parser.parse_args(), 0, time.perf_counter()
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        before = int(subprocess.check_output(query)) << 20
    gbps = random_gather_gbps(default_threads())
    rows: list[dict[str, Any]] = []
    loaded: dict[str, Any] = {}
    print(f"DRAM {gbps:.0f} GB/s. Each figure: measured, planned, their ratio.\n{HEAD}", flush=True)
    for pair in given.pairs:
        try:
            if time.perf_counter() - start > given.seconds:
                raise TimeoutError(f"{given.seconds:.0f} s are over")
            rows.append(compare(pair, loaded, gbps, before))
        except Exception as error:  # the others go on
            said = " ".join(f"{type(error).__name__}: {error}".split())
            rows.append({"pair": pair, "wrong": ["failed"], "short": said[:400]})
        given.out.write_text(json.dumps({"dram_gbps": gbps, "rows": rows}, indent=1) + "\n")
        print(line(rows[-1]), f"[{time.perf_counter() - start:.0f} s]", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
