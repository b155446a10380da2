"""What `deterministic` costs: tokens/s of decode steps with it and without, in turn, and of prompts in its chunks.

    python lab/scripts/deterministic_cost.py [--shapes qwen3-8b] [--methods full] [--batches 4,16] [--context 8192]

Weights, keys and values are random. For each method and batch: tokens/s, and the share that is lost.
"""

from __future__ import annotations

import time

import click

from coattn import LLM, SamplingParams
from coattn.hf.load import choose_device, choose_dtype
from coattn_lab.bench.decode import Bench, Case
from coattn_lab.bench.random_model import random_model
from coattn_lab.bench.requests import prompts_of
from coattn_lab.bench.stream import Item

LIMITS = {"hbm_gbps": 1.0, "dram_gbps": 1.0, "pcie_gbps": 1.0}
"""Floors are not asked for here."""


def prompt_rate(model: object, tokens: int, deterministic: bool) -> float:
    """Tokens/s of a prompt that is read alone, the better of two after a first one."""
    room = {"max_batch": 1, "max_length": tokens + 2, "reuse": False, "progress": False}
    with LLM((model, None), "full", deterministic=deterministic, **room) as llm:  # type: ignore[arg-type]
        taken = []
        for ids in prompts_of([Item(0, tokens, 1)] * 3, llm.vocabulary, 0):
            begun = time.perf_counter()
            llm.generate([ids], SamplingParams(max_new_tokens=1, ignore_eos=True))
            taken.append(time.perf_counter() - begun)
    return tokens / min(taken[1:])


@click.command()
@click.option("--shapes", default="qwen3-8b")
@click.option("--methods", default="full")
@click.option("--batches", default="4,16")
@click.option("--context", default=8192)
@click.option("--steps", default=40)
@click.option("--device", default="auto")
def main(shapes: str, methods: str, batches: str, context: int, steps: int, device: str) -> None:
    """Runs every case twice, prints a line for each."""
    where = choose_device(device)
    model = random_model(shapes, where, choose_dtype("auto", where))

    def show(what: str, usual: float, fixed: float) -> None:
        print(f"{what:>24}: usual {usual:,.1f}, deterministic {fixed:,.1f} tokens/s, {1 - fixed / usual:.1%} lost")

    for method in methods.split(","):
        for batch in map(int, batches.split(",")):
            rates = []
            for deterministic in (False, True):
                bench = Bench(model, shapes, LIMITS, None, steps, deterministic=deterministic)
                (row,) = bench.run([Case(method, batch, context)], 5.0)
                rates.append(row.tokens_per_s)
            show(f"{method}, batch {batch}", *rates)
    show(f"a prompt of {context}", *(prompt_rate(model, context, each) for each in (False, True)))


if __name__ == "__main__":
    main()
