"""Runs a piece of work: calls of a runner."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from coattn.engine.layer_boundary import LayerBoundaryDecode
from coattn.engine.runner.runner import Chunk, Runner
from coattn.engine.scheduler_output import Decode, Extend, Forward, Mixed, rows


def dispatch(work: Forward, runner: Runner, boundaries: LayerBoundaryDecode, counts: Counter[str]) -> Tensor | None:
    """-> float32 logits `[n, vocabulary]` of those that decode, then of each chunk that is the last of its prompt; None
    where there is neither. counts: gets the steps and the tokens that were read."""
    if isinstance(work, Extend):
        return _extend(work, runner, boundaries, counts)
    slots, tokens, history = rows(work.requests)
    counts["decode_steps"] += bool(slots)
    if isinstance(work, Decode):
        return runner.decode(slots, tokens, history)
    counts["prefill_steps"] += 1
    counts["mixed_steps"] += bool(slots)
    chunks = _chunks(work)
    total = sum(len(chunk.tokens) for chunk in chunks)
    counts["prefill_tokens"] += total
    hook = boundaries.hook(total)
    return runner.mix(chunks, slots, tokens, history, None if slots else hook)


def _extend(work: Extend, runner: Runner, boundaries: LayerBoundaryDecode, counts: Counter[str]) -> Tensor | None:
    """Of a prompt that was read elsewhere, what is known is stored; the rest is read."""
    request, stored = work.request, work.request.stored
    assert request.slot is not None
    if request.given is not None and stored < len(request.given.tokens):
        known = min(work.end, len(request.given.tokens))
        logits = runner.import_kv(request.slot, request.given, stored, known)
        if request.given.transferred and known == len(request.given.tokens):
            request.given = None  # stored now: its memory is free
        if known == work.end:
            return logits if work.last else None
        stored = known
    tokens = request.tokens(stored, work.end)
    counts["prefill_steps"] += 1
    counts["prefill_tokens"] += len(tokens)
    return runner.extend(request.slot, tokens, stored, work.last, boundaries.hook(len(tokens)))


def _chunks(work: Mixed) -> list[Chunk]:
    found = []
    for chunk in work.chunks:
        slot, stored = chunk.request.slot, chunk.request.stored
        assert slot is not None
        found.append(Chunk(slot, chunk.request.tokens(stored, chunk.end), stored, chunk.last))
    return found
