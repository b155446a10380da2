"""Every method on the same document and question: read once, then answered from the same keys and values."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.engine.runner.runner import Runner
from coattn.errors import InputError
from coattn.hf.architectures import describe_layers
from coattn.hf.forward import Session, end_tokens
from coattn.hf.load import Loaded
from coattn.hf.prefilled import Prefilled, prefill
from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.quantise.file import Origin, save
from coattn.kernels.quantise.kmeans import kmeans
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.tools.demo.prompt import ANSWER, FACT, QUESTION, Planted, plant
from coattn.tools.demo.seen import Names, Seen
from coattn.types import LayerShape

Progress = Callable[[str, int, int], None]
"""`(what, done, of how many)`"""
SHOWN = ("full", "offload", "cpu", "hgca", "scout", "hcattention", "streaming")
UNCAPPED = ("full", "hcattention")
CHUNK = 8192
"""Tokens read at a time on a GPU; elsewhere all of them."""
BLOCK = 32
"""Tokens per block of every method here."""
BINS = 200
"""Pieces of the document that the figure tells apart."""
CENTROIDS, WIDTH = 1024, 2
"""Of `hcattention`'s codebook, and the channels that a code stands for."""


def run_demo(loaded: Loaded, tokens: int, max_new_tokens: int, gpu_share: float, progress: Progress) -> dict[str, Any]:
    """Reads the document once, hands its keys and values to every method, and lets each answer the question.

    gpu_share: the cap of the GPU tier, as a share of all keys and values, for the methods that have one.
    """
    check_cap(tokens + max_new_tokens, gpu_share)
    planted = plant(loaded, tokens, max_new_tokens)
    started = time.perf_counter()
    layers = describe_layers(loaded.model)
    chunk = CHUNK if loaded.model.device.type == "cuda" else tokens
    chunks = -(-tokens // chunk)
    document = prefill(
        loaded.model, planted.ids, chunk, _counter("reading the document", chunks * len(layers), progress)
    )
    read_s = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        book = Path(folder) / "book.safetensors"
        write_book(document, layers, book, _counter("coding its keys", len(layers), progress))
        asked = DemoRun(loaded, document, planted, Names(document), book, max_new_tokens, gpu_share)
        rows = [asked.answer(name, progress) for name in SHOWN]
    return {
        "document_tokens": tokens,
        "fact_start": planted.start,
        "fact_end": planted.end,
        "kv_bytes": asked.kv_bytes,
        "gpu_share": gpu_share,
        "gpu_cap": int(asked.kv_bytes * gpu_share),
        "read_s": read_s,
        "seconds": time.perf_counter() - started,
        "fact": FACT,
        "question": QUESTION,
        "rows": rows,
    }


def check_cap(total: int, gpu_share: float) -> None:
    """Raises InputError where the cap has no room for what `scout` always holds and one block of its choice."""
    least = 4 * BLOCK
    if _scout_budget(total, gpu_share) < least:
        needed = least / max(gpu_share - 1 / BLOCK, 1e-9) + 2 * BLOCK
        raise InputError(
            f"{gpu_share:.1%} of the KV of {total:,} tokens is too little for the methods of the demo.",
            f"Give --tokens {math.ceil(needed / 100) * 100} or more, or a larger --gpu-share."
            if gpu_share >= 0.05
            else "Give a --gpu-share of 0.05 or more.",
        )


def _scout_budget(total: int, gpu_share: float) -> int:
    """As many tokens as fit in the cap beside the digests, which are two keys for each block."""
    return (int(total * gpu_share) - total // BLOCK) // BLOCK * BLOCK


def _counter(what: str, total: int, progress: Progress) -> Callable[[], None]:
    done = itertools.count(1)
    progress(what, 0, total)
    return lambda: progress(what, next(done), total)


def write_book(document: Prefilled, layers: list[LayerShape], path: Path, on_layer: Callable[[], None]) -> None:
    """A codebook of the document's own keys, clustered on all cores: small and quick, where `coattn calibrate` is
    thorough."""
    head_dim = layers[0].head_dim
    groups = head_dim // WIDTH

    def cluster(keys: Tensor) -> Codebook:
        # 16 points for each centroid, as many as `coattn calibrate` takes
        centroids = kmeans(keys.reshape(-1, WIDTH), CENTROIDS, most=16 * CENTROIDS)
        on_layer()
        return Codebook(centroids[None], groups)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        books = dict(enumerate(pool.map(cluster, [k for k, _ in document.kv])))
    marks = tuple(shape.mark for shape in layers)
    save(path, books, Origin("the demo's model", "the demo's document", "", groups, CENTROIDS, True, head_dim, marks))


@dataclass(frozen=True)
class DemoRun:
    """The document that was read, and what every method needs to answer from it."""

    loaded: Loaded
    document: Prefilled
    planted: Planted
    names: Names
    book: Path
    most: int
    """Tokens of the longest answer."""
    gpu_share: float

    @property
    def total(self) -> int:
        """Tokens of the document and the longest answer."""
        return len(self.planted.ids) + self.most

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of so many tokens."""
        return self.total * sum(x[0].nbytes for pair in self.document.kv for x in pair)

    def _params(self, name: str) -> Mapping[str, Any]:
        """Beside the method's own."""
        if name == "scout":
            return {"budget": _scout_budget(self.total, self.gpu_share)}
        if name == "hcattention":
            return {"codebook": str(self.book), "code_bits": 12}
        # `streaming` keeps positions of the text: turned to others, keys would not be known again
        return {"positions": "text"} if name == "streaming" else {}

    @torch.inference_mode()
    def answer(self, name: str, progress: Progress) -> dict[str, Any]:
        """One method's answer, its memory, and what it attended to.

        `attended`: share of the document's tokens that an average step, layer and head attends to; `fact_attended`: the
        same of the fact's tokens; `fact_kept`: share of the fact's KV that lies anywhere. `lies`, `seen`: of each piece
        of the document, see `Seen`. Shares of bytes are of what `full` holds, whole blocks as it is.
        """
        started = time.perf_counter()
        composed, capped = compose(METHODS[name], **self._params(name)), name not in UNCAPPED
        ledger = Ledger(int(self.kv_bytes * self.gpu_share) if capped else None)
        with Session(self.loaded.model) as session:
            probe = Seen(self.names)
            runtime = Runtime(session.layers, composed, ledger, 1, self.total, probes=[probe])
            runner = Runner(session, runtime, 1)
            try:
                ids = self._generate(runner, _counter(name, self.most, progress))
                lies, seen = probe.lies(), probe.shares()
            finally:
                runner.close()
        text = str(self.loaded.tokenizer.decode(ids, skip_special_tokens=True)).strip()
        held = self.kv_bytes // self.total * (-(-self.total // BLOCK) * BLOCK)
        all_seen, fact = torch.stack(list(seen.values())).sum(0), slice(self.planted.start, self.planted.end)
        return {
            "method": name,
            "exact": composed.exact,
            "capped": capped,
            "gpu_kv": ledger.peak["gpu"],
            "host_kv": ledger.peak["host"],
            "gpu_share": ledger.peak["gpu"] / held,
            "host_share": ledger.peak["host"] / held,
            "attended": all_seen.mean().item(),
            "fact_attended": all_seen[fact].mean().item(),
            "fact_kept": torch.maximum(*lies.values())[fact].mean().item(),
            "answer": text,
            "found": ANSWER in text,
            "seconds": time.perf_counter() - started,
            "params": {key: value for key, value in composed.params.items() if key != "codebook"},
            "lies": {tier: binned(share) for tier, share in lies.items()},
            "seen": {how: binned(share) for how, share in seen.items()},
        }

    def _generate(self, runner: Runner, on_token: Callable[[], None]) -> list[int]:
        """Greedy, from the keys and values that were read, until an end token or the longest answer."""
        ends, tokens = end_tokens(self.loaded.model, self.loaded.tokenizer), len(self.planted.ids)
        logits = runner.import_kv(0, self.document, 0, tokens)
        ids: list[int] = []
        while True:
            ids.append(int(logits[0].argmax()))
            on_token()
            if ids[-1] in ends or len(ids) == self.most:
                return ids
            logits = runner.decode([0], ids[-1:], [tokens + len(ids) - 1])


def binned(shares: Tensor) -> list[float]:
    """`[tokens]` -> the mean of each of `BINS` pieces of about the same length."""
    return [round(piece.mean().item(), 4) for piece in shares.tensor_split(BINS)]
