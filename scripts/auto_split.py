#!/usr/bin/env python3
"""Measures how place `both` of `auto` divides late tokens between PCIe and the CPU, on a machine with a GPU.

    scripts/auto_split.py [--machines 0:1,4:1,0:4,4:4] [--out split.json]

The same step with all late tokens fetched by the GPU (`pull`), with all attended by the CPU (`cpu`, as far as its lists
have room) and with what `both` has come to. A machine is a number of CPU threads (0: all) and how many times slower its
link is.

Simulated: random weights, keys and values; how many tokens are late, since the floor is set for it; the slower link,
by fetching every row so many times instead of once. Nothing is fetched ahead: all that is fetched is divided.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from coattn import native
from coattn.bench.decode import Bench, Case, Ready
from coattn.bench.preset import drive_floor
from coattn.hf import random_model
from coattn.ops.triton import attend_scored, token_pool
from coattn.provenance import provenance

FETCHING: list[tuple[Any, str]] = [(attend_scored, "_fetch"), (token_pool, "_bring")]
"""The kernels that fetch rows."""
ROW = """[method.auto_both]
cache = "tiered"
index = "sketch"
select = "weight_floor"
place = "both"
upkeep = "fit"
"""


@dataclass
class Measured:
    """One step; entries are of a sequence and KV head."""

    place: str
    threads: int
    link: int
    """How many times each row was fetched."""
    layer_us: float
    late: float
    """Entries that were attended out of DRAM in the step."""
    by_cpu: float
    fetch: float | None
    """Entries that the GPU fetches at most, the mean over layers."""


class Again:
    """A kernel that runs several times instead of once: those that fetch rows leave the same behind."""

    def __init__(self, kernel: Any, times: int) -> None:
        self.kernel, self.times = kernel, times

    def __getitem__(self, grid: Any) -> Any:
        run = self.kernel[grid]

        def launch(*args: Any, **kwargs: Any) -> None:
            for _ in range(self.times):
                run(*args, **kwargs)

        return launch


@contextmanager
def slow_link(times: int) -> Iterator[None]:
    """Steps that are captured inside this block fetch every row so many times."""
    if times == 1:
        yield
        return
    kept = [(module, name, getattr(module, name)) for module, name in FETCHING]
    for module, name, kernel in kept:
        setattr(module, name, Again(kernel, times))
    try:
        yield
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)


class Split:
    """One model; every place of it is prepared alike."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        shapes = {**random_model.SHAPES[options.shapes], "num_hidden_layers": options.layers, "vocab_size": 1024}
        random_model.SHAPES["split"] = shapes
        model = random_model.random_model("split", torch.device("cuda"), torch.bfloat16)
        self.bench = Bench(model, "split", {"hbm_gbps": None, "pcie_gbps": None, "dram_gbps": 1.0}, None, 2048)
        self.floor: float | None = None
        """The logarithm's argument that the first place was driven to; the others take it."""

    def run(self, folder: Path) -> Iterator[Measured]:
        path = folder / "auto_both.toml"
        path.write_text(ROW)
        places = (
            ("pull", "auto", {}),
            ("cpu", str(path), {"fetch": 0, "balance": False}),
            ("both", str(path), {}),
        )
        for place, method, params in places:
            case = Case(
                method, self.options.batch, self.options.context, params,
                fetched=self.options.late,
            )  # fmt: skip
            with self.bench.prepared(case) as ready:
                yield from self._place(place, ready)
            self.bench.rest()

    def _place(self, place: str, ready: Ready) -> Iterator[Measured]:
        ready.step()
        rules: list[Any] = [group.select for group in ready.runtime.groups]
        if self.floor is None:
            drive_floor(ready.runtime, ready.stepped, self.options.late)
            self.floor = rules[0].floors._written[0]
        for rule in rules:
            rule.floors.write([self.floor] * rule.cache.spec.seqs)
        for threads, link in self.options.machines:
            ready.runner.drop_captures()  # type: ignore[attr-defined]
            native.set_threads(threads)  # of workers that nobody has work for now
            with slow_link(link):
                yield self._measure(place, threads, link, ready)

    def _measure(self, place: str, threads: int, link: int, ready: Ready) -> Measured:
        for _ in range(self.options.settle if place == "both" else 4):
            ready.step()
        taken = []
        for _ in range(self.options.steps):
            begun = time.perf_counter()
            ready.step()
            taken.append(time.perf_counter() - begun)
        found = ready.runtime.report(ready.stepped())
        batch, us = self.options.batch, statistics.median(taken) * 1e6 / self.options.layers
        return Measured(
            place, threads or native.default_threads(), link, us, found["row_entries"] / batch,
            found.get("cpu_entries", 0.0) / batch, found.get("fetched_at_most"),
        )  # fmt: skip


def machines(text: str) -> list[tuple[int, int]]:
    """`4:1` -> 4 threads, and a link as it is."""
    found = [part.split(":") for part in text.split(",")]
    return [(int(threads), int(link)) for threads, link in found]


def main() -> int:
    """Prints a line for each machine; exit code 1 where `both` takes over a fifth more than the better single path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=machines, default=machines("0:1,4:1,0:4,4:4"))
    parser.add_argument("--shapes", default="qwen3-14b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--late", type=float, default=96.0, help="tokens that a KV head fetches in a step")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--settle", type=int, default=160, help="steps before `both` is measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU: this measures PCIe.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for row in Split(options).run(Path(folder)):
            found.append(row)
            print(row, flush=True)
    failed = False
    for threads, link in options.machines:
        wanted = threads or native.default_threads(), link
        own = {row.place: row for row in found if (row.threads, row.link) == wanted}
        ratio = own["both"].layer_us / min(own["pull"].layer_us, own["cpu"].layer_us)
        failed |= ratio > 1.2
        print(
            f"{wanted[0]} threads, link 1/{link}: pull {own['pull'].layer_us:.0f}, cpu {own['cpu'].layer_us:.0f}, "
            f"both {own['both'].layer_us:.0f} us a layer, {ratio:.2f} of the better; both fetches at most "
            f"{own['both'].fetch:.0f} of {own['both'].late:.0f} a KV head, the CPU has {own['both'].by_cpu:.0f}"
        )
    if options.out is not None:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        simulated = ["random weights", "random keys and values", "late tokens by a driven floor", "slower links"]
        data = {
            "provenance": provenance(),
            "settings": settings,
            "simulated": simulated,
            "rows": list(map(asdict, found)),
        }
        options.out.write_text(json.dumps(data, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
