"""Every method on the same document and question: read once, then answered from the same keys and values."""

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.engine.runner.runner import Runner
from coattn.hf.forward import Session, end_tokens
from coattn.hf.load import Loaded
from coattn.hf.prefilled import Prefilled, prefill
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.tools.demo.prompt import ANSWER, FACT, QUESTION, Planted, plant
from coattn.tools.demo.seen import Names, Seen
from coattn.units import ceil_div

Progress = Callable[[str, int, int], None]
"""`(what, done, of how many)`"""
SHOWN = ("full", "offload", "cpu", "hgca", "scout", "hcattention", "streaming")
GPU_SHARE = 1 / 8
"""The cap of the GPU tier, as a share of all keys and values, for all methods but `full`."""
CHUNK = 8192
"""Tokens read at a time."""
BLOCK = 32
"""Tokens per block of every method here."""
BINS = 200
"""Pieces of the document that the figure tells apart."""


def run_demo(loaded: Loaded, tokens: int, max_new_tokens: int, progress: Progress) -> dict[str, Any]:
    """Reads the document once, hands its keys and values to every method, and lets each answer the question."""
    planted = plant(loaded, tokens, max_new_tokens)
    started = time.perf_counter()
    layers = ceil_div(tokens, CHUNK) * loaded.model.config.num_hidden_layers
    document = prefill(loaded.model, planted.ids, CHUNK, _counter("reading the document", layers, progress))
    read_s = time.perf_counter() - started
    run = DemoRun(loaded, document, planted, Names(document), max_new_tokens)
    rows = [run.answer(name, progress) for name in SHOWN]
    return {
        "document_tokens": tokens,
        "fact_start": planted.start,
        "fact_end": planted.end,
        "kv_bytes": run.kv_bytes,
        "gpu_share": GPU_SHARE,
        "gpu_cap": int(run.kv_bytes * GPU_SHARE),
        "read_s": read_s,
        "seconds": time.perf_counter() - started,
        "fact": FACT,
        "question": QUESTION,
        "rows": rows,
    }


def _counter(what: str, total: int, progress: Progress) -> Callable[[], None]:
    done = itertools.count(1)
    progress(what, 0, total)
    return lambda: progress(what, next(done), total)


class DemoRun(NamedTuple):
    """The document that was read, and what every method needs to answer from it."""

    loaded: Loaded
    document: Prefilled
    planted: Planted
    names: Names
    most: int
    """Tokens of the longest answer."""

    @property
    def total(self) -> int:
        """Tokens of the document and the longest answer."""
        return len(self.planted.ids) + self.most

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of so many tokens."""
        return self.total * sum(x[0].nbytes for pair in self.document.kv for x in pair)

    def _params(self, name: str) -> dict[str, Any]:
        """Beside the method's own."""
        if name == "scout":  # as many tokens as fit in the cap beside the digests, which are two keys for each block
            return {"budget": (int(self.total * GPU_SHARE) - self.total // BLOCK) // BLOCK * BLOCK}
        if name == "hcattention":  # a small codebook of the document's own keys, and codes that fit in the cap
            keys = self.document.kv[0][0]
            groups = keys.shape[-1] * keys.element_size() // 8
            return {"groups": groups, "centroids": 1024, "code_bits": 12, "window_blocks": 1}
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
        composed, capped = compose(METHODS[name], **self._params(name)), name != "full"
        ledger = Ledger(int(self.kv_bytes * GPU_SHARE) if capped else None)
        with Session(self.loaded.model) as session:
            probe = Seen(self.names)
            runtime = Runtime(session.layers, composed, ledger, 1, self.total, probes=[probe], states=session.states)
            runner = Runner(session, runtime, 1)
            try:
                ids = self._generate(runner, _counter(name, self.most, progress))
                lies, seen = probe.lies(), probe.shares()
            finally:
                runner.close()
        text = str(self.loaded.tokenizer.decode(ids, skip_special_tokens=True)).strip()
        held = self.kv_bytes // self.total * ceil_div(self.total, BLOCK) * BLOCK
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
            "params": dict(composed.params),
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
