"""Every method on the same document and question: read once, then answered from the same keys and values."""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
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
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.tools.demo.book import write_book
from coattn.tools.demo.prompt import ANSWER, FACT, QUESTION, Planted, plant
from coattn.tools.demo.seen import Names, Seen

Progress = Callable[[str, int, int], None]
"""`(what, done, of how many)`"""
CHUNK = 8192
"""Tokens read at a time on a GPU; elsewhere all of them."""
BLOCK = 32
"""Tokens per block of every method here."""
BINS = 200
"""Pieces of the document that the figure tells apart."""


@dataclass(frozen=True)
class Entry:
    """A row of the demo. how: what the method does, for people."""

    how: str
    capped: bool = True
    params: Callable[[int, int, Path], Mapping[str, Any]] = lambda *_: {}
    """`(tokens that the cap holds, of how many, folder of the codebook) -> parameters` beside the method's own."""


def _scout(cap: int, total: int, _: Path) -> Mapping[str, Any]:
    """As many tokens as fit in the cap beside the digests, which are two keys for each block."""
    return {"budget": (cap - total // BLOCK) // BLOCK * BLOCK}


def _codes(_: int, __: int, folder: Path) -> Mapping[str, Any]:
    return {"codebook": str(folder / BOOK), "code_bits": 12}


def _in_text(*_: Any) -> Mapping[str, Any]:
    """Positions of the text: turned to others, keys would not be known again."""
    return {"positions": "text"}


BOOK = "book.safetensors"
ENTRIES: dict[str, Entry] = {
    "full": Entry("All of the KV lies on the GPU, which attends to all of it.", capped=False),
    "offload": Entry("The KV lies in DRAM. For every token, all of it is copied to the GPU, layer by layer."),
    "cpu": Entry("The KV lies in DRAM. The CPU attends to it there; only queries and results cross PCIe."),
    "hgca": Entry(
        "The GPU attends to a window. Of the rest, in DRAM, the CPU attends to what the last tokens gave weight to."
    ),
    "scout": Entry(
        "The GPU attends to the blocks it holds, the CPU to others whose digests promise more.", params=_scout
    ),
    "hcattention": Entry(
        "Codes of the keys on the GPU say what weighs most. The CPU adds up those values; the rest counts as a mean.",
        capped=False,
        params=_codes,
    ),
    "streaming": Entry("Keeps the first tokens and the newest ones. Forgets the rest.", params=_in_text),
}


@dataclass
class Row:
    """One method's line of the table. Shares of bytes are of what `full` holds, whole blocks as it is."""

    method: str
    exact: bool
    how: str
    capped: bool
    gpu_kv: int
    host_kv: int
    gpu_share: float
    host_share: float
    attended: float
    """Share of the document's tokens that an average step, layer and head attends to."""
    fact_attended: float
    """The same of the fact's tokens."""
    fact_kept: float
    """Share of the fact's KV that lies anywhere."""
    answer: str
    found: bool
    seconds: float
    params: dict[str, Any]
    lies: dict[str, list[float]] = field(default_factory=dict)
    """`gpu`, `dram`: share of the KV bytes of each piece of the document."""
    seen: dict[str, list[float]] = field(default_factory=dict)
    """`gpu`, `pulled`, `cpu`: share of steps, layers and heads that attend to each piece."""


def run_demo(loaded: Loaded, tokens: int, max_new_tokens: int, gpu_share: float, progress: Progress) -> dict[str, Any]:
    """Reads the document once, hands its keys and values to every method, and lets each answer the question.

    gpu_share: the cap of the GPU tier, as a share of all keys and values, for the methods that have one.
    """
    check_cap(tokens + max_new_tokens, gpu_share)
    planted = plant(loaded, tokens, max_new_tokens)
    started = time.perf_counter()
    document = _read(loaded, planted, progress)
    read_s = time.perf_counter() - started
    names = Names(document)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        layers = describe_layers(loaded.model)
        write_book(document, layers, Path(folder) / BOOK, _counter("coding its keys", len(layers), progress))
        for name in ENTRIES:
            asked = DemoRun(loaded, document, planted, names, Path(folder), max_new_tokens, gpu_share)
            rows.append(asked.answer(name, progress))
    whole = kv_bytes(document, max_new_tokens)
    return {
        "document_tokens": planted.tokens,
        "fact_start": planted.start,
        "fact_end": planted.end,
        "kv_bytes": whole,
        "gpu_share": gpu_share,
        "gpu_cap": int(whole * gpu_share),
        "read_s": read_s,
        "seconds": time.perf_counter() - started,
        "fact": FACT,
        "question": QUESTION,
        "rows": [asdict(row) for row in rows],
    }


def check_cap(total: int, gpu_share: float) -> None:
    """Raises InputError where the cap has no room for what `scout` always holds and one block of its choice."""
    least = 4 * BLOCK
    if _scout(int(total * gpu_share), total, Path())["budget"] < least:
        needed = least / max(gpu_share - 1 / BLOCK, 1e-9) + 2 * BLOCK
        raise InputError(
            f"{gpu_share:.1%} of the KV of {total:,} tokens is too little for the methods of the demo.",
            f"Give --tokens {math.ceil(needed / 100) * 100} or more, or a larger --gpu-share."
            if gpu_share >= 0.05
            else "Give a --gpu-share of 0.05 or more.",
        )


def kv_bytes(document: Prefilled, answer: int) -> int:
    """Bytes of keys and values of the document and the longest answer."""
    token = sum(x[0].nbytes for pair in document.kv for x in pair)
    return token * (len(document.tokens) + answer)


def _read(loaded: Loaded, planted: Planted, progress: Progress) -> Prefilled:
    chunk = CHUNK if loaded.model.device.type == "cuda" else planted.tokens
    steps = -(-planted.tokens // chunk) * int(loaded.model.config.num_hidden_layers)
    return prefill(loaded.model, planted.ids, chunk, _counter("reading the document", steps, progress))


def _counter(what: str, total: int, progress: Progress) -> Callable[[], None]:
    done = itertools.count(1)
    progress(what, 0, total)
    return lambda: progress(what, next(done), total)


@dataclass(frozen=True)
class DemoRun:
    """The document that was read, and what every method needs to answer from it."""

    loaded: Loaded
    document: Prefilled
    planted: Planted
    names: Names
    folder: Path
    most: int
    """Tokens of the longest answer."""
    gpu_share: float

    @torch.inference_mode()
    def answer(self, name: str, progress: Progress) -> Row:
        """One method's answer, its memory, and what it attended to."""
        started = time.perf_counter()
        entry, whole, total = ENTRIES[name], kv_bytes(self.document, self.most), self.planted.tokens + self.most
        composed = compose(METHODS[name], **entry.params(int(total * self.gpu_share), total, self.folder))
        ledger = Ledger(int(whole * self.gpu_share) if entry.capped else None)
        with Session(self.loaded.model) as session:
            seen_by = Seen(self.names)
            runtime = Runtime(session.layers, composed, ledger, 1, total, probes=[seen_by])
            runner = Runner(session, runtime, 1)
            try:
                ids = self._generate(runner, name, progress)
                lies, seen = seen_by.lies(), seen_by.shares()
            finally:
                runner.close()
        text = str(self.loaded.tokenizer.decode(ids, skip_special_tokens=True)).strip()
        held = whole // total * (-(-total // BLOCK) * BLOCK)
        all_seen, fact = torch.stack(list(seen.values())).sum(0), slice(self.planted.start, self.planted.end)
        return Row(
            method=name,
            exact=composed.exact,
            how=entry.how,
            capped=entry.capped,
            gpu_kv=ledger.peak["gpu"],
            host_kv=ledger.peak["host"],
            gpu_share=ledger.peak["gpu"] / held,
            host_share=ledger.peak["host"] / held,
            attended=all_seen.mean().item(),
            fact_attended=all_seen[fact].mean().item(),
            fact_kept=torch.maximum(*lies)[fact].mean().item(),
            answer=text,
            found=ANSWER in text,
            seconds=time.perf_counter() - started,
            params={key: value for key, value in composed.params.items() if key != "codebook"},
            lies={"gpu": binned(lies[0]), "dram": binned(lies[1])},
            seen={how: binned(share) for how, share in seen.items()},
        )

    def _generate(self, runner: Runner, name: str, progress: Progress) -> list[int]:
        """Greedy, from the keys and values that were read, until an end token or the longest answer."""
        count = _counter(name, self.most, progress)
        ends = end_tokens(self.loaded.model, self.loaded.tokenizer)
        logits = runner.import_kv(0, self.document, 0, self.planted.tokens)
        ids: list[int] = []
        while True:
            ids.append(int(logits[0].argmax()))
            count()
            if ids[-1] in ends or len(ids) == self.most:
                return ids
            logits = runner.decode([0], ids[-1:], [self.planted.tokens + len(ids) - 1])


def binned(shares: Tensor) -> list[float]:
    """`[tokens]` -> the mean of each of `BINS` pieces of about the same length."""
    return [round(piece.mean().item(), 4) for piece in shares.tensor_split(BINS)]
