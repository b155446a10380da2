"""What the first request waits for after an engine is ready: its time beside the tenth's, and what was compiled for it.
How keys spread is measured before, as an engine with a tokenizer does.

    python lab/scripts/first_request.py [--shapes qwen3-8b] [--methods full,auto,scout] [--prompt 6000] [--layers 8]

Weights and tokens are random. Each request has a text of its own, but the last one, which is the first one's again: a
hit. For each method: seconds of the first, the tenth and the hit, and the kernels that were compiled, or loaded from
disk, after `warm_up`.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch

from coattn import LLM, SamplingParams
from coattn.hf.forward import Session
from coattn.hf.load import choose_device, choose_dtype
from coattn.hf.sketches import measure
from coattn.kernels.cuda import nvrtc
from coattn.kernels.quantise.layer_file import TextOrigin
from coattn.kernels.quantise.sketch import SPREADS
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn_lab.bench.random_model import random_model

REQUESTS = 10


def given(model: Any, method: str, folder: str) -> dict[str, Any]:
    """What the row is given besides: the file of its model's keys, where it takes one."""
    if "sketch" not in compose(METHODS[method]).params:
        return {}
    with Session(model) as session:
        ids = torch.randint(0, session.vocabulary, (16_384,), generator=torch.Generator().manual_seed(99))
        spreads, marks = measure(session, ids, None), tuple(shape.mark for shape in session.layers)
    path = Path(folder) / "spreads.safetensors"
    SPREADS.save(path, spreads, TextOrigin("random", "random", "", len(ids), marks))
    return {"sketch": str(path)}


@click.command()
@click.option("--shapes", default="qwen3-8b")
@click.option("--methods", default="full,auto,scout")
@click.option("--prompt", default=6000)
@click.option("--layers", default=8, help="Of the model; fewer are captured sooner.")
@click.option("--device", default="auto")
def main(shapes: str, methods: str, prompt: int, layers: int, device: str) -> None:
    """Runs the requests, prints a line for each method."""
    where = choose_device(device)
    model = random_model(shapes, where, choose_dtype("auto", where))
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    made: Counter[str] = Counter()
    if where.type == "cuda":
        import triton

        triton.knobs.runtime.jit_post_compile_hook = lambda **of: made.update([str(of["repr"]).split("(")[0]])
    with tempfile.TemporaryDirectory() as folder:
        for name in methods.split(","):
            with LLM((model, None), name, max_batch=2, max_length=2 * prompt, **given(model, name, folder)) as llm:
                llm.warm_up()
                made.clear()
                before, times = dict(nvrtc.counts), []
                for seed in (*range(REQUESTS), 0):
                    draws = torch.Generator().manual_seed(seed)
                    ids = torch.randint(0, llm.vocabulary, (prompt + seed,), generator=draws).tolist()
                    start = time.perf_counter()
                    llm.generate([ids], SamplingParams(max_new_tokens=24, ignore_eos=True))
                    times.append(time.perf_counter() - start)
                more = {kind: new for kind, n in nvrtc.counts.items() if (new := n - before.get(kind, 0))}
                first, tenth, hit = times[0], times[-2], times[-1]
                shown = f"first {first:.3f} s, tenth {tenth:.3f} s ({first / tenth:.2f}), hit {hit:.3f} s"
                print(f"{name:>8}  {shown}; compiled: Triton {dict(made) or 'nothing'}, CUDA {more or 'nothing'}")


if __name__ == "__main__":
    main()
