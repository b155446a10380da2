"""Holds `coattn plan` against this GPU: bytes, time to the first token and decode speed of rows of random weights.

    python lab/scripts/measure_plan.py OUT [--seconds 100] SHAPES:METHOD:TOKENS ...

OUT receives plan.json: of each row what was forecast and what was measured. The first row of some shapes runs twice:
once for kernels to compile. A row for which there is no time left is not run.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from coattn import LLM, SamplingParams
from coattn.hf.random_model import SHAPES, random_model
from coattn.tools.plan.estimate import Machine, estimate
from coattn.tools.plan.known import find_card
from coattn.tools.plan.shape import read_shape

NEW_TOKENS = 48
MEASURED_DRAM_RATE = 139e9
"""Of 15 threads of this machine (results/decode_qwen3_8b_32k.json)."""


def run(model: Any, shapes: str, method: str, tokens: int, machine: Machine) -> dict[str, Any]:
    """One prompt that fills the context but for the answer."""
    row = estimate(method, read_shape(shapes, SHAPES[shapes]), 1, tokens, machine)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    limit = {} if method == "full" else {"gpu_kv": row.kv + (1 << 20)}
    with LLM((model, None), method, max_batch=1, max_length=tokens, **limit) as llm:
        llm.warm_up()
        prompt = torch.randint(1000, llm.vocabulary, (tokens - NEW_TOKENS,)).tolist()
        stamps, start = [], time.perf_counter()
        for _ in llm.stream(prompt, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)):
            stamps.append(time.perf_counter() - start)
        free, whole = torch.cuda.mem_get_info()
        outside = whole - free - torch.cuda.memory_reserved()
        peak, host = torch.cuda.max_memory_reserved() + outside, llm.report()["host_kv_peak"]
    steps = sorted(b - a for a, b in pairwise(stamps[1:]))
    return {
        "row": f"{shapes} {method} {tokens}",
        "gpu": [row.gpu, peak],
        "kv": [row.kv, llm.ledger.peak["gpu"]],
        "dram": [row.dram, host],
        "first_token_s": [row.first_token_s, stamps[0]],
        "second_token_s": stamps[1],
        "step_ms": [1e3 * (row.step_s or 0), 1e3 * steps[len(steps) // 2]],
    }


def main() -> None:
    """Runs the rows, prints a table."""
    out, words = Path(sys.argv[1]), sys.argv[2:]
    seconds = float(words.pop(words.index("--seconds") + 1)) if "--seconds" in words else 1e9
    deadline, device = time.time() + seconds, torch.device("cuda")
    machine = Machine(find_card("h200"), None, MEASURED_DRAM_RATE)
    made: list[dict[str, Any]] = []
    models: dict[str, Any] = {}
    for word in (word for word in words if ":" in word):
        shapes, method, tokens = word.split(":")
        if time.time() > deadline:
            print(f"no time left for {word}")
            continue
        if shapes not in models:
            models.clear()
            torch.cuda.empty_cache()
            models[shapes] = random_model(shapes, device, torch.bfloat16)
            run(models[shapes], shapes, method, 20_000, machine)
        made.append(run(models[shapes], shapes, method, int(tokens), machine))
        found = made[-1]
        pairs = "  ".join(
            f"{name} {a / scale:.2f} -> {b / scale:.2f} ({a / b - 1:+.0%})"
            for name, scale in (("gpu", 2**30), ("kv", 2**30), ("dram", 2**30), ("first_token_s", 1), ("step_ms", 1))
            for a, b in [found[name]]
            if b
        )
        print(f"{found['row']}: {pairs}; second token {found['second_token_s']:.2f} s", flush=True)
        (out / "plan.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
