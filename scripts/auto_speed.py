#!/usr/bin/env python3
"""Measures decode steps of `auto` beside `scout`'s in the same run, on a machine with a GPU.

    scripts/auto_speed.py [--layers 40] [--fetched 10,18,22] [--looked-up 174,250,204] [--now 1.7] [--code-bytes 32,16]
        [--turns 1] [--profile] [--out speed.json] [CASE...]

A case is CONTEXTxBATCH, with `:int8` for keys and values in 8 bits in DRAM. Without any: those that
docs/methods/auto.md speaks of. Fewer layers take less DRAM and less time; the GPU budget shrinks with them. Few layers
are no measure of all: what a step has once, and the first layers of `scout`, count for more. With several turns the
rows of a case are measured so many times, one after the other: a machine's own drift then shows as a spread.

Simulated: random weights, keys and values of Qwen3-14B's shapes; how many tokens a KV head fetches in a step, since the
floor is set for it, and looks up in its pool, since a kernel draws them; how much of what `scout` picks changes.
Without options they are as many as of three texts at 30,720 tokens (results/auto_now_30k: Python source, topics,
essays). With --profile the kernels of one layer are printed. What is measured is written row by row.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from coattn.bench.decode import Case, as_dict
from coattn.bench.preset import drive_floor
from coattn.bench.reused import reusing
from coattn.bench.scout import CHANGE, RESERVE, Asked, Fits, ScoutBench, scout
from coattn.errors import CoattnError
from coattn.hf import random_model
from coattn.hf.architectures import describe_layers
from coattn.provenance import provenance
from coattn.units import parse_bytes

SHAPES, ALL = "qwen3-14b", 40
CASES = "65536x10 65536x10:int8 8192x53 32768x1 131072x1 1048576x1:int8"
FETCHED, LOOKED_UP = "10.3,17.6,21.7", "174,250,204"
NOW = 1.7
"""Times the floor that is waited for: a sixth of what random keys fetch is then, as of texts; with 1.4 a third."""
BUDGET, WRONG = 2048, 0.05
LIMITS = {"hbm_gbps": 4250.0, "pcie_gbps": 51.0, "dram_gbps": 130.0}
"""Of an H200 and its host: only the rows' floors hang on them."""


def cases(
    text: str, fetched: list[float], looked_up: list[int], now: float = NOW, code_bytes: Sequence[int | None] = (None,)
) -> list[Case]:
    """`scout`, then `auto` with each number of tokens, and each size of a sketch; the last number looked up counts for
    those after it."""
    found = re.fullmatch(r"(\d+)x(\d+)(?::(int8))?", text)
    if found is None:
        sys.exit(f"{text!r} is no case: give CONTEXTxBATCH, or CONTEXTxBATCH:int8.")
    (context, batch), form = map(int, found.groups()[:2]), found[3]
    more = {"host_dtype": form} if form else {}
    made = [scout(Asked((context,), (batch,), BUDGET, CHANGE, WRONG, more), context, batch)]
    for i, count in enumerate(fetched):
        driven = {"fetched": count, "looked_up": looked_up[min(i, len(looked_up) - 1)]}
        for size in code_bytes:
            params = {**more, "now": now, "far": 1.0, **({} if size is None else {"code_bytes": size})}
            made.append(Case("auto", batch, context, params, warm=4, **driven))
    return made


def profiled(bench: ScoutBench, case: Case, layers: int) -> Iterator[str]:
    """Kernels of one layer in the middle of a captured step: when each begins, how long it takes."""
    from torch.profiler import ProfilerActivity, profile

    size = case.batch * Fits(describe_layers(bench.model), None, None).bytes(case)[1]
    with reusing(size + (1 << 30), bench.device), bench.prepared(case) as ready:
        ready.step()
        if case.fetched is not None:
            drive_floor(ready.runtime, ready.stepped, case.fetched)
        for _ in range(6):
            ready.step()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            ready.step()
            torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA
    events = sorted((e.time_range.start, e.time_range.end, e.name) for e in found.events() if e.device_type == kind)
    own = "weigh_planes" if case.method == "auto" else "score_digest"
    starts = [i for i, event in enumerate(events) if event[2].startswith(own)]
    first, last = starts[layers // 2 : layers // 2 + 2]
    each = [events[b][0] - events[a][0] for a, b in pairwise(starts)]
    layer_by_layer = " ".join(f"{x:.0f}" for x in each)
    yield f"{case.method}: {each[layers // 2]:.0f} us a layer; all: {layer_by_layer}"
    for begin, end, name in events[first:last]:
        yield f"  {begin - events[first][0]:8.1f} {end - begin:7.1f} {name[:60]}"


def _size(params: Mapping[str, Any]) -> str:
    return f",code_bytes={params['code_bytes']}" if "code_bytes" in params else ""


def main() -> None:
    """Runs the cases and prints a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES.split(), metavar="CASE")
    parser.add_argument("--layers", type=int, default=ALL)
    parser.add_argument("--fetched", default=FETCHED, help="tokens a KV head fetches in a step, with commas")
    parser.add_argument(
        "--looked-up", default=LOOKED_UP, help="tokens that it looks up in its pool, one for each of those"
    )
    parser.add_argument("--now", type=float, default=NOW, help="times the floor that is waited for")
    parser.add_argument("--code-bytes", help="bytes of a key's sketch, with commas; default: the row's own")
    parser.add_argument("--turns", type=int, default=1, help="times that the rows of a case are measured, in turn")
    parser.add_argument("--gpu-memory", default="48GiB")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    fetched = [float(x) for x in given.fetched.split(",")]
    looked_up = [int(x) for x in given.looked_up.split(",")]
    sizes: list[int | None] = [int(x) for x in given.code_bytes.split(",")] if given.code_bytes else [None]
    wanted = [(text, cases(text, fetched, looked_up, given.now, sizes) * given.turns) for text in given.cases]
    if not torch.cuda.is_available():
        sys.exit("There is no GPU here: these are times of one.")
    random_model.SHAPES["cut"] = {**random_model.SHAPES[SHAPES], "num_hidden_layers": given.layers}
    ghost = random_model.random_model(SHAPES, torch.device("meta"), torch.bfloat16)
    whole = sum(x.nbytes for x in ghost.parameters())
    model = random_model.random_model("cut", torch.device("cuda"), torch.bfloat16)
    memory = parse_bytes(given.gpu_memory, "--gpu-memory")
    assert memory is not None
    room = int((memory - whole - RESERVE) * given.layers / ALL)
    bench = ScoutBench(model, SHAPES, LIMITS, room, given.steps)
    result: dict[str, Any] = {"layers": given.layers, "gpu_memory": memory, "rows": [], **provenance()}
    result["command"] = result["command"].replace("coattn", "scripts/auto_speed.py", 1)
    for text, rows in wanted:
        before, begun = 0.0, time.perf_counter()
        if given.profile:
            for case in rows:
                print("\n".join(profiled(bench, case, given.layers)), flush=True)
            continue
        try:
            for row in bench.run(rows, 2.0):
                before = row.ms_per_step if row.method == "scout" else before
                result["rows"].append(as_dict(row))
                if given.out is not None:
                    given.out.write_text(json.dumps(result, indent=2) + "\n")
                kinds = ("row_entries", "later_entries", "cold_entries")
                waited, later, cold = (row.notes.get(name, 0) / row.batch for name in kinds)
                gpu, host = (x / 2**30 for x in (row.gpu_kv_bytes, row.host_kv_bytes))
                took = time.perf_counter() - begun
                print(
                    f"{text} {row.method}{_size(row.params)}: {row.ms_per_step:.2f} ms, "
                    f"{before / row.ms_per_step:.3f} of scout; "
                    f"waited for {waited:.1f}, later {later:.1f}, looked up {cold:.1f}; "
                    f"GPU idle {row.gpu_idle or 0:.1%}; KV {gpu:.1f} and {host:.1f} GiB ({took:.0f} s)",
                    flush=True,
                )
        except CoattnError as error:  # one case that does not fit is no reason to lose the others
            print(f"{text}: {error}", flush=True)


if __name__ == "__main__":
    main()
