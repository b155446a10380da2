"""The tables of the HCAttention paper as rows of this project, on any model and text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from coattn.parts.select.pq_top_p import RESTS
from coattn.tools.evaluate.fidelity import compare
from coattn.tools.evaluate.forced import Forced
from coattn.tools.evaluate.perplexity import interval

CENTROIDS = 8192
TAUS = (0.95, 0.9)


@dataclass(frozen=True)
class Row:
    """One setting: parameters of the method, and the codebook it needs: `(groups, centroids, shared)` or None."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    book: tuple[int, int, bool] | None = None
    beside: str | None = None
    """The row with exact keys at the same tau, if it is compared with one."""


def budgets(head_dim: int) -> Iterator[Row]:
    """50%, 25% and 12.5% of the KV in GPU memory, at two thresholds (section 4)."""
    shares = [("25%", (head_dim // 2, CENTROIDS, True)), ("12.5%", (head_dim // 4, CENTROIDS, True))]
    for tau in TAUS:
        yield Row(f"50%, tau {tau}", {"groups": 0, "tau": tau})
        for share, book in shares:
            yield Row(f"{share}, tau {tau}", {"tau": tau}, book, f"50%, tau {tau}")


def thresholds(_head_dim: int) -> Iterator[Row]:
    """Table 3: tau from 0.3 to 1 without quantisation."""
    for tau in (0.3, 0.5, 0.7, 0.9, 1.0):
        yield Row(f"tau {tau}", {"groups": 0, "tau": tau})


def quantisers(head_dim: int) -> Iterator[Row]:
    """Table 4: centroids and groups at tau 1; the paper's groups are of a head size of 128, these of the same width."""
    for count in (256, 1024, 2048, 4096, CENTROIDS):
        yield Row(f"{count} centroids, groups of 4", {"tau": 1}, (head_dim // 4, count, True))
    yield Row(f"{CENTROIDS} centroids, groups of 8", {"tau": 1}, (head_dim // 8, CENTROIDS, True))
    for shared in (True, False):
        name = f"{CENTROIDS} centroids, groups of 2" + ("" if shared else ", a codebook each")
        yield Row(name, {"tau": 1}, (head_dim // 2, CENTROIDS, shared))


def renormalising(_head_dim: int) -> Iterator[Row]:
    """What the paper leaves open: what is left out counts or not, and whose entries a head attends to."""
    for union in (True, False):
        for tail in RESTS:
            name = f"tau 0.9, {'the group' if union else 'each head'}, left out: {tail}"
            yield Row(name, {"groups": 0, "tau": 0.9, "tail": tail, "union": union})


TABLES = {"budgets": budgets, "3": thresholds, "4": quantisers, "renormalise": renormalising}


def book_name(book: tuple[int, int, bool]) -> str:
    """The file of a codebook in a folder of them."""
    groups, count, shared = book
    return f"groups{groups}_centroids{count}{'' if shared else '_separate'}.safetensors"


def measure(row: Row, own: Forced, full: Forced, beside: Forced | None, shares: list[float]) -> dict[str, Any]:
    """A row in numbers: the decode steps against full attention, and against exact keys at the same tau."""

    def ratio(other: Forced) -> dict[str, Any]:
        differences = own.losses - other.losses
        return {"ratio": float(differences.mean().exp()), "ratio_95": interval(differences)}

    return {
        "row": row.name,
        "method": "hcattention",
        "params": own.report["params"],
        "simulated": [],
        "perplexity": float(own.losses.mean().exp()),
        "perplexity_full": float(full.losses.mean().exp()),
        "against_full": ratio(full),
        "against_exact_keys": None if beside is None else ratio(beside),
        **{name: value for name, value in compare(own, full).items() if name != "steps"},
        "share_attended": sum(shares) / len(shares),
        "share_attended_layers": shares,
        "gpu_kv_bytes": own.report["gpu_kv_bytes"],
        "host_kv_bytes": own.report["host_kv_bytes"],
        "gpu_kv_bytes_full": full.report["gpu_kv_bytes"],
    }
