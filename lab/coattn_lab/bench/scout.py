"""The figures of the ScoutAttention paper as cases of the decode bench, with batches as large as fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from coattn.kernels.quantise.blocks import Layout
from coattn.method.row import compose
from coattn.method.table import find_method
from coattn.types import LayerShape
from coattn_lab.bench.decode import Bench, Case, Ready
from coattn_lab.bench.drift import Drift, noise_for

if TYPE_CHECKING:
    from coattn.parts.select.digest_top import DigestTop

BLOCK = 32
CHANGE = 0.124
"""Share of the picked blocks that are new in every step. SmolLM2 had this by Quest's bound with 1,024 of 4,096 tokens
picked (`coattn-lab eval attention`). A smaller share of a longer text changes more, so this is the kind end."""
PERIOD = 1000
"""Steps after which every block's lasting score has been drawn anew."""
AGE = 256
"""Without recall: steps since the residents were chosen, the mean over an answer of 512 tokens."""
WARM = 10
"""Steps in which pools fill, and every layer is recalled once by default."""
RESERVE = 1 << 30
"""Bytes of a GPU that neither weights nor KV can have: CUDA's own, activations, graphs."""
SPARE_TOKENS = 32
PARTIAL = 0.2
"""Of every key, what InfiniGen keeps in GPU memory."""


@dataclass(frozen=True)
class Asked:
    """What the user asked for."""

    context: Sequence[int]
    batch: Sequence[int]
    """Where a figure fixes it; elsewhere the largest that fits, and no larger than the largest of these."""
    budget: int
    change: float
    wrong: float
    """Share of the scores that a prediction gets wrong."""
    params: dict[str, Any]
    """More parameters of `scout`."""
    blocks: Sequence[int] = (16, 32, 64)


class Fits:
    """How many sequences of a method fit in so much memory."""

    def __init__(self, layers: Sequence[LayerShape], gpu: int | None, host: int | None) -> None:
        """gpu, host: bytes for KV, None for no limit."""
        self.layers, self.token = layers, sum(shape.token_bytes for shape in layers)
        self.gpu, self.host = gpu, host

    def batch(self, case: Case, most: int) -> int:
        """The largest batch of a case, at most `most`; 0: not even one."""
        gpu, host = self.bytes(case)
        counts = [most]
        if self.gpu is not None and gpu:
            counts.append(self.gpu // gpu)
        if self.host is not None and host:
            counts.append(self.host // host)
        return max(0, min(counts))

    def bytes(self, case: Case) -> tuple[int, int]:
        """Of one sequence, in GPU memory and in DRAM."""
        block = int(case.params.get("block", BLOCK))
        tokens = -(-(case.context + SPARE_TOKENS) // block) * block
        whole, digests = tokens * self.token, tokens // block * self.token
        window = int(case.params.get("window_blocks", 2)) * block * self.token
        if case.method == "full":
            return whole, 0
        if case.method == "quest":
            return whole + digests, 0
        form = str(case.params.get("host_dtype", "model"))
        packed = sum(s.kv_heads * Layout(block, s.head_dim).bytes for s in self.layers)
        host = whole if form == "model" else tokens // block * packed
        if case.method == "scout":
            return int(case.params["budget"]) * self.token + window + digests, host
        if case.method == "infinigen":  # a fifth of every key beside a window of one block
            return int(tokens * self.token * PARTIAL / 2) + 2 * block * self.token, host
        return window + block * self.token, host + int(host * float(case.params.get("capacity", 0.0)))


class ScoutBench(Bench):
    """Adds what was picked to the notes: how much of it changes, how much the CPU has."""

    def _after(self, case: Case, ready: Ready) -> dict[str, float]:
        rules = [group.select for group in ready.runtime.groups if "picks" in group.select.provides]
        picks = cast("DigestTop", rules[0]).picks if rules else None
        if picks is None:
            return {}
        budget, changed, ratio = cast("DigestTop", rules[0]).budget, [], []
        before = None
        for _ in range(4):
            ready.step()
            now = torch.stack([lists.chosen[: case.batch] for _, lists in sorted(picks.made.items())])
            if before is not None:
                changed.append(_changed(before, now))
            before = now
            ratio.append((picks.attended(case.batch) or (0.0, 0.0))[1] / case.batch / budget)
        return {"change": sum(changed) / len(changed), "cpu_of_budget": sum(ratio) / len(ratio)}


def _changed(before: torch.Tensor, now: torch.Tensor) -> float:
    """Share of the blocks picked now, `[layers, seqs, kv_heads, k]`, that were not picked before."""
    return 1 - float((now[..., :, None] == before[..., None, :]).any(-1).float().mean())


def scout(asked: Asked, context: int, batch: int = 1, **params: Any) -> Case:
    """The row of the paper, picks driven to the change rate that was asked for."""
    given = {"budget": asked.budget, "block": BLOCK, **asked.params, **params}
    return driven(Case("scout", batch, context, given), asked.change, asked.wrong)


def driven(case: Case, change: float, wrong: float) -> Case:
    """The case with picks that change so much from step to step, and predictions that are so often wrong."""
    settings = compose(find_method(case.method), **case.params).params
    block = int(settings["block"])
    blocks = case.context // block
    count = min(int(settings["budget"]) // block - int(settings["window_blocks"]), blocks)
    noise = noise_for(change, blocks, count) if count < blocks else 0.0
    return replace(case, drift=Drift(noise, PERIOD, wrong), change=change, warm=WARM)


def hgca(asked: Asked, context: int, batch: int = 1) -> Case:
    """With the same budget: half of it the window, half the CPU's."""
    window = asked.budget // 2
    kept = min(1.0, (asked.budget - window) / max(1, context - window))
    params: dict[str, Any] = {"window_blocks": window // BLOCK, "block": BLOCK}
    params |= {"capacity": min(1.0, 1.25 * kept + 0.02)} | {k: v for k, v in asked.params.items() if k == "host_dtype"}
    return Case("hgca", batch, context, params, (kept,))


def infinigen(asked: Asked, context: int, batch: int = 1) -> Case:
    """With the same budget, all of it fetched by the GPU but for the newest block."""
    return Case("infinigen", batch, context, {"budget": asked.budget, "block": BLOCK, "partial": PARTIAL})


def methods(asked: Asked, fits: Fits) -> list[Case]:
    """Figure 8: throughput by input length, each method with the largest batch that fits."""
    cases = []
    for context in asked.context:
        rows = [
            Case("full", 1, context, {"block": BLOCK}),
            Case("offload", 1, context, {"block": BLOCK, "window_blocks": asked.budget // BLOCK}),
            Case("quest", 1, context, {"block": BLOCK, "budget": asked.budget}),
            hgca(asked, context),
            infinigen(asked, context),
            scout(asked, context),
        ]
        cases += largest(rows, asked, fits)
    return cases


def batches(asked: Asked, fits: Fits) -> list[Case]:
    """Figures 3, 9 and 11: throughput by batch size, and how long the GPU waits."""
    rows = [make(asked, c, b) for c in asked.context for b in asked.batch for make in (hgca, infinigen, scout)]
    return [row for row in rows if fits.batch(row, row.batch) == row.batch]


def block_sizes(asked: Asked, fits: Fits) -> list[Case]:
    """Figure 10: throughput by block size; larger blocks have fewer digests, so more sequences fit."""
    return largest([scout(asked, c, block=b) for c in asked.context for b in asked.blocks], asked, fits)


def ablation(asked: Asked, fits: Fits) -> list[Case]:
    """Figure 12: without both, with recall, with pre-computation, with both."""
    cases = []
    for context in asked.context:
        whole = scout(asked, context)
        batch = fits.batch(whole, max(asked.batch))
        for ahead in (False, True):
            for interval in (0, int(whole.params.get("recall_interval", 8))):
                params = {**whole.params, "recall_interval": interval}
                if not ahead:
                    params = {k: v for k, v in params.items() if k != "ahead_from"}
                schedule, age = None if ahead else "same_layer", 0 if interval else AGE
                cases.append(replace(whole, batch=batch, params=params, schedule=schedule, age=age))
    return [case for case in cases if case.batch]


def largest(rows: list[Case], asked: Asked, fits: Fits) -> list[Case]:
    """Each row with the largest batch that fits; without those of which none does."""
    sized = [replace(row, batch=fits.batch(row, max(asked.batch))) for row in rows]
    return [row for row in sized if row.batch]


FIGURES: dict[str, Callable[[Asked, Fits], list[Case]]] = {
    "3": batches,
    "8": methods,
    "9": batches,
    "10": block_sizes,
    "11": batches,
    "12": ablation,
}
"""Figure of the paper -> its cases."""


def speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens per second of each row, as a multiple of every other method's at the same context."""
    found = []
    for row in rows:
        for other in rows:
            if row["context"] == other["context"] and row["method"] == "scout" and other["method"] != "scout":
                found.append(
                    {
                        "context": row["context"],
                        "batch": row["batch"],
                        "over": other["method"],
                        "its_batch": other["batch"],
                        "times": row["tokens_per_s"] / other["tokens_per_s"],
                    }
                )
    return found
