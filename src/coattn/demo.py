"""The demo: a long document, a fact planted in it, a question, and four methods under one small budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from coattn.engine.one import generate
from coattn.engine.params import SamplingParams
from coattn.errors import InputError
from coattn.evaluate.forced import force
from coattn.hf.architectures import describe_layers
from coattn.hf.generate import encode_prompt
from coattn.hf.load import Loaded
from coattn.text import default_text

FACT = "Remember this: the access code of the northern lighthouse is 58213."
QUESTION = "What is the access code of the northern lighthouse? Answer with the number."
ANSWER = "58213"
DEPTH = 0.4
"""How far into the document the fact stands."""
METHOD_ORDER = ("full", "offload", "cpu", "streaming")


@dataclass(frozen=True)
class Row:
    """One method's line of the table."""

    method: str
    exact: bool
    gpu_kv: int
    host_kv: int
    prefill_s: float
    tokens_per_s: float | None
    answer: str
    found: bool
    agreement: float
    """Share of full attention's answer tokens that the method finds most likely too, each after the same text."""


def build_prompt(loaded: Loaded, tokens: int) -> torch.Tensor:
    """Ids `[about tokens]`: a real document with the fact in it, then the question, in the model's chat template."""
    body = default_text().body
    low, high = 0, min(len(body), tokens * 8)
    while high - low > 64:
        middle = (low + high) // 2
        if len(encode_prompt(loaded, compose_prompt(body[:middle]))) <= tokens:
            low = middle
        else:
            high = middle
    if low == 0:
        raise InputError(f"{tokens} tokens are too few for the demo.", "Give --tokens 512 or more.")
    return encode_prompt(loaded, compose_prompt(body[:low]))


def compose_prompt(document: str) -> str:
    """The fact goes between two paragraphs."""
    cut = document.find("\n\n", int(len(document) * DEPTH))
    cut = len(document) // 2 if cut < 0 else cut
    return f"{document[:cut]}\n\n{FACT}\n\n{document[cut:].strip()}\n\n{QUESTION}"


def run_demo(loaded: Loaded, tokens: int, max_new_tokens: int, on_start: Callable[[str], None]) -> dict[str, Any]:
    """Every method of the demo on the same prompt. `full` has no cap; the others get an eighth of its KV."""
    ids = build_prompt(loaded, tokens)
    on_start("warming up")
    generate(
        loaded, ids[:64], "full", sampling=SamplingParams(max_new_tokens=4)
    )  # the first method should not pay for it
    started = time.perf_counter()
    token_bytes = sum(layer.token_bytes for layer in describe_layers(loaded.model))
    rows: list[Row] = []
    answer = torch.empty(0, dtype=torch.long)
    for name in METHOD_ORDER:
        on_start(name)
        cap = None if name == "full" else token_bytes * (len(ids) + max_new_tokens) // 8
        result = generate(loaded, ids, name, sampling=SamplingParams(max_new_tokens=max_new_tokens), gpu_kv=cap)
        agreement = 1.0
        if name == "full":
            answer = result.new_ids
        else:
            # the prompt's last token is the first decode step, so that each answer token is predicted under the method
            forced = force(loaded.model, torch.cat([ids, answer])[:-1], len(ids) - 1, name, cap)
            agreement = (forced.logits.argmax(-1) == answer).double().mean().item()
        rows.append(
            Row(
                name,
                bool(result.report["exact"]),
                result.report["gpu_kv_peak"],
                result.report["host_kv_peak"],
                result.prefill_s,
                result.tokens_per_s,
                result.text.strip(),
                ANSWER in result.text,
                agreement,
            )
        )
    return {
        "document_tokens": len(ids),
        "gpu_cap": token_bytes * (len(ids) + max_new_tokens) // 8,
        "kv_bytes": token_bytes * (len(ids) + max_new_tokens),
        "seconds": time.perf_counter() - started,
        "fact": FACT,
        "question": QUESTION,
        "rows": [asdict(row) for row in rows],
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """KV per tier of each method, the cap, and whether it answered."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    names = [f"{row['method']}\n({'exact' if row['exact'] else 'lossy'})" for row in rows]
    mib = 1 << 20
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    gpu = [row["gpu_kv"] / mib for row in rows]
    host = [row["host_kv"] / mib for row in rows]
    axes.bar(names, gpu, label="GPU tier", color="#4477aa")
    axes.bar(names, host, bottom=gpu, label="DRAM", color="#ddcc77")
    axes.axhline(result["gpu_cap"] / mib, color="#aa3377", lw=1, ls="--", label="GPU cap: an eighth")
    for i, row in enumerate(rows):
        speed = "" if row["tokens_per_s"] is None else f"\n{row['tokens_per_s']:.1f} tokens/s"
        text = ("answers" if row["found"] else "does not answer") + speed
        axes.text(i, gpu[i] + host[i], text, ha="center", va="bottom", fontsize=9)
    axes.set_ylim(0, max(a + b for a, b in zip(gpu, host, strict=True)) * 1.25)
    axes.set_ylabel("KV cache, MiB")
    axes.set_title(f"A fact in a document of {result['document_tokens']:,} tokens")
    axes.legend(loc="upper right", fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
