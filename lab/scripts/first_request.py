"""What the first request waits for after an engine is ready: its time beside the tenth's, and what was compiled for it.

    python lab/scripts/first_request.py [--shapes qwen3-8b] [--methods full,auto,scout] [--prompt 6000] [--layers 8]

Weights and tokens are random. Each request has a text of its own, but the last one, which is the first one's again: a
hit. For each method: seconds of the first, the tenth and the hit, and the kernels that were compiled, or loaded from
disk, after `warm_up`.
"""

from __future__ import annotations

import time
from collections import Counter

import click
import torch

from coattn import LLM, SamplingParams
from coattn.hf.load import choose_device, choose_dtype
from coattn.kernels.cuda import nvrtc
from coattn_lab.bench.random_model import random_model

REQUESTS = 10


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

        triton.knobs.runtime.jit_post_compile_hook = lambda **given: made.update([str(given["repr"]).split("(")[0]])
    for name in methods.split(","):
        with LLM((model, None), name, max_batch=2, max_length=2 * prompt) as llm:
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
            shown = (
                f"first {times[0]:.3f} s, tenth {times[-2]:.3f} s ({times[0] / times[-2]:.2f}), hit {times[-1]:.3f} s"
            )
            print(f"{name:>8}  {shown}; compiled: Triton {dict(made) or 'nothing'}, CUDA {more or 'nothing'}")


if __name__ == "__main__":
    main()
