"""Runs steps of a model under a method, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coattn.hf.experts import weights_read
from coattn.hf.forward import OnLogits, Session
from coattn.hf.prefilled import Prefilled
from coattn.kernels.upload import upload
from coattn.part import MOST
from coattn.parts.handover.mailbox import Span
from coattn.step.probe import Probe
from coattn.step.runtime import Runtime
from coattn.step.trace.step import StepTrace, Timing, step_trace
from coattn.types import Phase, Step


class Chunk(NamedTuple):
    """The next tokens of a prompt in one slot, after `history` stored ones. last: the prompt ends with them.

    on_logits: gets the logits of all its tokens, as `Session.forward` gives them.
    """

    slot: int
    tokens: Sequence[int]
    history: int
    last: bool
    on_logits: OnLogits | None = None


class Runner:
    """The Transformers modules, called layer by layer. Runs on every machine; used by one thread at a time.

    A step that raises leaves every sequence with the history it had, but those that the runtime calls `torn`: of these
    nothing may be used. BudgetError means that nothing was started.
    Tensors that a step returns are valid until the next one.
    """

    best: list[int] | None = None
    """The most likely token of each row of the last `decode`, where it is known without sampling; negative where the
    logits were not finite."""
    uncaptured: str | None = None
    """Why decode steps run layer by layer, where `choose_runner` chose so."""
    launched: Callable[[], None] | None = None
    """Called while a GPU is at work on a `decode` and the host has nothing to do; never where steps run layer by
    layer."""

    def __init__(self, session: Session, runtime: Runtime, slots: int) -> None:
        """slots: sequences of the caches, known as `0 .. slots - 1`."""
        self.session, self.runtime, self.slots = session, runtime, slots
        self.weights = weights_read(session.model)
        self.clock = Clock()
        runtime.probes.append(self.clock)
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        """What prompts are read inside of: the fused forms of the model's modules, where somebody has made them."""
        self._last: tuple[int, int, Step, list[Span]] | None = None
        ahead = [(group, [MOST] if session.states else group.cache.spec.layers) for group in runtime.groups]
        if any(group.schedule.predicts(layer) for group, layers in ahead for layer in layers):
            session.look_ahead()

    def extend(
        self,
        slot: int,
        tokens: Sequence[int],
        history: int,
        want_logits: bool,
        on_layer_boundary: Callable[[], None] | None = None,
        on_logits: OnLogits | None = None,
    ) -> Tensor | None:
        """Stores tokens after `history` stored ones -> float32 logits after the last, `[1, vocabulary]`, if wanted.

        They are wanted of the last chunk of a prompt. on_layer_boundary: called between two layers; may `decode` other
        slots. on_logits: see `Chunk`.
        """
        return self.mix([Chunk(slot, tokens, history, want_logits, on_logits)], (), (), (), on_layer_boundary)

    @torch.no_grad()
    def import_kv(self, slot: int, given: Prefilled, start: int, end: int) -> Tensor:
        """Stores tokens `start .. end` of a prompt that was read elsewhere, after the ones before them.

        -> float32 logits after the prompt's last token, `[1, vocabulary]`, on the model's device.
        """
        queried = len(given.tokens) - len(given.queries[0])
        # the queries that go with a prompt are its last ones: the tokens before them are a step of their own
        for first, last in ((start, min(end, queried)), (max(start, queried), end)):
            if first >= last:
                continue
            try:
                self._import(Step(Phase.EXTEND if first else Phase.PREFILL, (slot,), (first,), (last - first,)), given)
            except BaseException:
                if first > start:  # the step before it is history, and the caller does not know of it
                    self.runtime.torn.add(slot)
                raise
        return given.logits.to(self.session.head_device)

    def _import(self, step: Step, given: Prefilled) -> None:
        """Stores a part of a prompt that was read elsewhere, with its queries where they are known of all of it."""
        (first,), (last,) = step.history, step.lengths
        queried = len(given.tokens) - len(given.queries[0])
        running = self.runtime.begin(step)
        try:
            for layer, (k, v) in enumerate(given.kv):
                q = given.queries[layer][first - queried : last - queried] if first >= queried else None
                self.runtime.import_kv(running, layer, k[first:last], v[first:last], q, given.scales[layer])
            self.runtime.commit(running)
        except BaseException:
            self.runtime.abort(running)
            raise

    def decode(self, slots: Sequence[int], tokens: Sequence[int], history: Sequence[int]) -> Tensor:
        """Stores one token in each slot -> float32 logits after it, `[n, vocabulary]`, on the model's device."""
        step = Step.of(tuple(slots), tuple(history), (1,) * len(slots))
        logits = self._run(step, tokens, torch.tensor(history), slice(None))
        assert logits is not None
        return logits

    def mix(
        self,
        chunks: Sequence[Chunk],
        slots: Sequence[int],
        tokens: Sequence[int],
        history: Sequence[int],
        on_layer_boundary: Callable[[], None] | None = None,
    ) -> Tensor | None:
        """Stores chunks of prompts, and one token in each slot, in one forward call.

        -> float32 logits `[n, vocabulary]` after the token of each slot, then after each chunk that is the last of its
        prompt; None where there is neither. Where the runtime says that it mixes (`unmixed`), or there are no slots:
        only then on_layer_boundary is called, as of `extend`.
        """
        reading = step_of(chunks)
        ids, positions, rows = list(tokens), [*history], list(range(len(slots)))
        on_logits: list[tuple[slice, OnLogits]] = []
        for chunk in chunks:
            if chunk.on_logits is not None:
                on_logits.append((slice(len(ids), len(ids) + len(chunk.tokens)), chunk.on_logits))
            ids += chunk.tokens
            positions += range(chunk.history, chunk.history + len(chunk.tokens))
            if chunk.last:
                rows.append(len(ids) - 1)
        wanted = upload(rows, self.session.device) if rows else None
        if not slots:
            hook = on_layer_boundary
            return self._run(reading, ids, torch.tensor(positions), wanted, on_layer_boundary=hook, on_logits=on_logits)
        step = Step(Phase.DECODE, tuple(slots), tuple(history), (1,) * len(slots))
        return self._run(step, ids, torch.tensor(positions), wanted, reading, on_logits=on_logits)

    def warm_up(self, sizes: Sequence[int] | None) -> list[dict[str, Any]]:
        """Prepares decode steps of these batch sizes, all it knows if None -> what was captured, in how long."""
        return []

    def trace(self) -> StepTrace | None:
        """Where the time of the last `decode` went; None before the first. Layer by layer, attention counts as the
        CPU's work and the rest of the model as the GPU's, as if there were one."""
        if self._last is None:
            return None
        begin, end, step, spans = self._last
        return step_trace(self.runtime, step, Timing(begin, end, tuple(spans), ()), self.weights.of(step.seqs))

    def timing(self) -> Timing | None:
        """When the last `decode` ran, and what a GPU waited for; None where nobody measured it."""
        return None  # the host's clock does not see what a GPU does

    def close(self) -> None:
        """Gives every byte back and leaves the model as it was."""
        self.session.close()
        self.runtime.release()

    def _run(
        self,
        step: Step,
        tokens: Sequence[int],
        positions: Tensor,
        rows: slice | Tensor | None,
        co_step: Step | None = None,
        on_layer_boundary: Callable[[], None] | None = None,
        on_logits: Sequence[tuple[slice, OnLogits]] = (),
    ) -> Tensor | None:
        device = self.session.device
        self.clock.start()
        decodes = step.phase is Phase.DECODE and co_step is None
        running = self.runtime.begin(step, co_step, on_layer_boundary)
        try:
            with nullcontext() if decodes else self.around():
                ids, places = upload(tokens, device), upload(positions, device)
                logits = self.session.forward(self.runtime, running, ids, places, rows, on_logits)
            self.runtime.commit(running)
        except BaseException:
            self.runtime.abort(running)
            raise
        if decodes:
            self._last = (self.clock.begun, time.monotonic_ns(), step, self.clock.spans)
        return logits


def step_of(chunks: Sequence[Chunk]) -> Step:
    """The step of some chunks; never a decode step, however short they are."""
    history = tuple(chunk.history for chunk in chunks)
    return Step(
        Phase.EXTEND if any(history) else Phase.PREFILL,
        tuple(chunk.slot for chunk in chunks),
        history,
        tuple(len(chunk.tokens) for chunk in chunks),
        frozenset(chunk.slot for chunk in chunks if not chunk.last),
    )


class Clock(Probe):
    """When each layer's attention ran."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A step is about to begin."""
        self.begun, self._since = time.monotonic_ns(), 0
        self.spans: list[Span] = []

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self._since = time.monotonic_ns()

    def output(self, step: Step, layer: int, out: Tensor) -> None:
        start, end = self._since, time.monotonic_ns()
        self.spans.append(Span(layer, posted=start, ready=start, answered=end, seen=start, done=end))
