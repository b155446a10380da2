"""The kernels of HCAttention alone: scores from codes and top-p, beside the memory's limit and attention over keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coattn.kernels.attend import attend
from coattn.kernels.cuda import score_pq, top_p
from coattn.kernels.quantise.codebook import Codebook
from coattn.kernels.quantise.pack import packed_bytes
from coattn.kernels.reference.top_p import TAILS
from coattn.kernels.triton import score_pq as decoding
from coattn.types import BlockList

Q_HEADS, KV_HEADS, D, BLOCK, COUNT = 32, 8, 128, 32, 8192
SPREAD = 256 << 20
"""Bytes that a measurement goes through before it reads anything again, so that no cache holds it."""


@dataclass(frozen=True)
class Form:
    """How keys are coded."""

    groups: int
    bits: int
    bytes: bool = False
    """Centroids in 8 bits."""


FORMS = (Form(64, 16), Form(64, 13), Form(32, 16), Form(32, 13), Form(32, 16, True), Form(32, 13, True))


def seconds(run: Callable[[int], object], copies: int, least: float = 0.02) -> float:
    """Time of one `run(i)`, captured over all copies and replayed."""
    for i in range(min(2, copies)):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    best, spent = float("inf"), 0.0
    while spent < least:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken = start.elapsed_time(end) / 1e3
        spent, best = spent + taken, min(best, taken / copies)
    return best


def measure(context: int, form: Form, kept: float, hbm_gbps: float, device: torch.device) -> dict[str, Any]:
    """One row: one layer of one sequence, top-p at the tau that keeps about `kept` of the tokens of a KV head."""
    width = D // form.groups
    row = packed_bytes(form.groups, form.bits)
    blocks, nbytes = context // BLOCK, context * KV_HEADS * row
    copies = max(1, min(64, -(-SPREAD // nbytes)))
    book = Codebook(torch.randn(1, COUNT, width, device=device).to(torch.bfloat16), form.groups)
    book = book.rounded() if form.bytes else book
    codes = [_codes(blocks, form, row, device) for _ in range(copies)]
    q = torch.randn(1, Q_HEADS, D, device=device).to(torch.bfloat16)
    table = torch.randperm(blocks, device=device).int()[None]
    tokens = torch.tensor([context], dtype=torch.int32, device=device)
    work = top_p.Work(device)
    _, _, top = work.of(Q_HEADS)

    def scores(i: int) -> Tensor:
        return score_pq.score_pq(q, codes[i], table, tokens, book, form.bits, D**-0.5, None, top)

    first = scores(0)
    # heads choose independently here, so each keeps a part of what its group keeps
    own = 1 - (1 - kept) ** (KV_HEADS / Q_HEADS)
    ordered = first[0, 0].double().softmax(-1).sort(-1, descending=True).values
    tau = float(ordered[:, : int(own * context)].sum(-1).mean())

    def choose(found: Tensor) -> top_p.Chosen:
        return top_p.top_p(found, tokens, None, tau, None, TAILS.index("mean"), context, work, together=True)

    share = float(choose(first).count.float().mean()) / context
    held = [scores(i) for i in range(min(copies, max(1, SPREAD // (context * Q_HEADS * 4))))]
    maxima = top.clone()
    score_s = seconds(scores, copies)

    def select(i: int) -> object:
        top.copy_(maxima)
        return choose(held[i])

    select_s = seconds(select, len(held))
    both_s = seconds(lambda i: choose(scores(i)), copies)
    decode_s = seconds(lambda i: decoding.score_pq(q, codes[i], table, tokens, book, form.bits, D**-0.5, None), copies)
    return {
        "context": context,
        "groups": form.groups,
        "code_bits": form.bits,
        "centroid_bits": 8 if form.bytes else 16,
        "code_bytes": nbytes,
        "score_us": score_s * 1e6,
        "score_gbps": nbytes / score_s / 1e9,
        "share_of_hbm": nbytes / score_s / 1e9 / hbm_gbps,
        "top_p_us": select_s * 1e6,
        "both_us": both_s * 1e6,
        "both_gbps": nbytes / both_s / 1e9,
        "tau": tau,
        "kept_share": share,
        "triton_score_us": decode_s * 1e6,
    }


def attention_us(context: int, device: torch.device) -> float:
    """Attention over 16-bit keys and values of the same length, in GPU memory."""
    blocks = context // BLOCK
    copies = max(1, min(16, -(-SPREAD // (context * KV_HEADS * D * 4))))
    memory = [torch.randn(blocks, KV_HEADS, 2, BLOCK, D, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    q = torch.randn(1, 1, Q_HEADS, D, device=device, dtype=torch.bfloat16)
    table = torch.randperm(blocks, device=device).int()[None, None]
    tokens = torch.tensor([[context]], dtype=torch.int32, device=device)
    return seconds(lambda i: attend(q, memory[i], BlockList(table, tokens, context), D**-0.5, None), copies) * 1e6


def run(contexts: list[int], kept: float, hbm_gbps: float, device: torch.device) -> Iterator[dict[str, Any]]:
    """Row after row."""
    for context in contexts:
        keys_us = attention_us(context, device)
        torch.cuda.empty_cache()
        for form in FORMS:
            yield {**measure(context, form, kept, hbm_gbps, device), "attention_16_bit_us": keys_us}
            torch.cuda.empty_cache()


def _codes(blocks: int, form: Form, row: int, device: torch.device) -> Tensor:
    if form.bits == 16:
        return torch.randint(0, COUNT, (blocks, KV_HEADS, BLOCK, form.groups), device=device, dtype=torch.int16)
    return torch.randint(0, 256, (blocks, KV_HEADS, BLOCK, row), device=device, dtype=torch.uint8)
