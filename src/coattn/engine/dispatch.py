"""Runs a piece of work: calls of a runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from coattn.engine.request import Forward, PromptChunk
from coattn.engine.runner.runner import Chunk, Runner
from coattn.engine.sampling.scored import scoring

BoundaryHook = Callable[[int], Callable[[], None]]
"""A chunk of so many tokens is about to be read -> what to call between two of its layers."""


def dispatch(work: Forward, runner: Runner, hook: BoundaryHook, counts: Counter[str]) -> Tensor | None:
    """-> float32 logits `[n, vocabulary]` of those that decode, then of each chunk that is the last of its prompt; None
    where there is neither. counts: gets the steps and the tokens that were read."""
    if len(work.chunks) == 1 and not work.requests:
        return _extend(work.chunks[0], runner, hook, counts)
    slots = [request.in_slot for request in work.requests]
    tokens = [(request.output or request.prompt)[-1] for request in work.requests]
    history = [request.stored for request in work.requests]
    counts["decode_steps"] += bool(slots)
    if not work.chunks:
        return runner.decode(slots, tokens, history)
    counts["prefill_steps"] += 1
    counts["mixed_steps"] += bool(slots)
    each = [(chunk.request, chunk) for chunk in work.chunks]
    chunks = [Chunk(r.in_slot, r.tokens(r.stored, chunk.end), r.stored, chunk.last, scoring(r)) for r, chunk in each]
    total = sum(len(chunk.tokens) for chunk in chunks)
    counts["prefill_tokens"] += total
    on_layer_boundary = hook(total)
    return runner.mix(chunks, slots, tokens, history, None if slots else on_layer_boundary)


def _extend(chunk: PromptChunk, runner: Runner, hook: BoundaryHook, counts: Counter[str]) -> Tensor | None:
    """Of a prompt that was read elsewhere, what is known is stored; the rest is read."""
    request, stored = chunk.request, chunk.request.stored
    if request.given is not None and stored < len(request.given.tokens):
        known = min(chunk.end, len(request.given.tokens))
        logits = runner.import_kv(request.in_slot, request.given, stored, known)
        if request.given.transferred and known == len(request.given.tokens):
            request.given = None  # stored now: its memory is free
        if known == chunk.end:
            return logits if chunk.last else None
        stored = known
    tokens = request.tokens(stored, chunk.end)
    counts["prefill_steps"] += 1
    counts["prefill_tokens"] += len(tokens)
    return runner.extend(request.in_slot, tokens, stored, chunk.last, hook(len(tokens)), scoring(request))
