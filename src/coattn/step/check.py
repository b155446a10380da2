"""Does a row do what it says? It is run over small random tensors beside attention as the textbook writes it.

What `compose` can tell from the parts alone it refuses. This looks at what the parts do together: prompts, decode steps
with predicted queries, turns and tokens taken back, once with the parameters under which nothing is left out, and once
as the row stands.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.kernels.sink_logits import softmax
from coattn.method.row import Composed, Method, compose
from coattn.parts.call import AttentionCall
from coattn.parts.executor.base import State
from coattn.step.probe import Probe
from coattn.step.runtime import LayerGroup, Runtime
from coattn.types import LayerShape, Rope, Selection, Step

TOKENS = 224
"""Of the longest sequence of the check that leaves nothing out."""
LONGEST = 6144
"""Of the longest sequence in which a budget is tried; a larger budget is not."""
BOUND = 2e-5
"""Largest difference of an exact row from the textbook, in float32 over values of about 1."""
HEADS, KV_HEADS, DIM, SCALE = 6, 2, 16, 0.4
ROPE = Rope(tuple(10 ** -(i / 2) for i in range(DIM // 2)))
SEQS = 2


@dataclass(frozen=True)
class Checked:
    """What a run found."""

    error: float
    """Largest difference from the textbook, over prompts, turns and decode steps."""
    attended: int
    """Most entries that any KV head attended to in a decode step."""
    stored: int
    """Entries of the longest sequence in that step."""
    most: int | None
    """Entries that the rule says a KV head attends to at most."""


@dataclass(frozen=True)
class Verdict:
    """Whether a row is what it says, and what was seen."""

    method: str
    exact: bool
    """What the row says of itself."""
    whole: Mapping[str, Any] | None
    """Parameters under which it should leave nothing out; None: its rule names none."""
    equal: Checked | None
    """The run with these."""
    own: Checked
    """The run with the row's own parameters."""
    problems: tuple[str, ...]


class Counting(Probe):
    """Counts what decode steps attend to."""

    most_attended = 0

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        rows = call.step.seqs
        lists = [part.in_reach(rows).tokens.cpu() for part in (selection.gpu, selection.host) if part is not None]
        if selection.rows is not None:
            lists.append(selection.rows.count.cpu())
        if lists:
            total = sum(torch.broadcast_to(each, (len(each), KV_HEADS)) for each in lists)
            self.most_attended = max(self.most_attended, int(torch.as_tensor(total).max()))


class Trial:
    """A row, the tokens it was given, and the textbook's answer to every step."""

    def __init__(self, composed: Composed, device: torch.device, layers: int) -> None:
        self.device, self.layers, self.lengths, self.error = device, layers, [0] * SEQS, 0.0
        shape = LayerShape(HEADS, KV_HEADS, DIM, torch.float32, device, rope=ROPE)
        self.counted = Counting()
        # every other layer has sinks, of scores as its keys have
        sinks = [torch.linspace(-2, 4, HEADS) if i % 2 else None for i in range(layers)]
        shapes = [replace(shape, sink_logits=x if x is None else x.to(device)) for x in sinks]
        self.runtime, self.sinks = Runtime(shapes, composed, Ledger(), SEQS, None, probes=[self.counted]), sinks
        self.draws = torch.Generator().manual_seed(0)
        empty = torch.empty(0, KV_HEADS, DIM)
        self.seen = [[(empty, empty)] * SEQS for _ in range(layers)]

    def step(self, new: tuple[int, ...]) -> None:
        """So many new tokens for each sequence."""
        step = Step.of(tuple(range(SEQS)), tuple(self.lengths), new)
        running = self.runtime.begin(step)
        drawn = [[self._draw(step.tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS)] for _ in range(self.layers)]
        for layer, (q, k, v) in enumerate(drawn):
            following = layer + 1
            if following < self.layers and self.runtime.predicts(running, following):
                real = drawn[following][0]
                guess = (real + 0.2 * self._draw(step.tokens, HEADS)).to(self.device)
                with self.runtime.side_stream(running, following, guess):
                    self.runtime.predict(running, following, guess, SCALE)
            here = self.device
            out = self.runtime.attend(running, layer, q.to(here), k.to(here), v.to(here), SCALE).cpu()
            for i, (start, end) in enumerate(step.spans):
                old = self.seen[layer][i]
                keys, values = (torch.cat([a, b[start:end]]) for a, b in zip(old, (k, v), strict=True))
                self.seen[layer][i] = keys, values
                if end > start:
                    error = (out[start:end] - textbook(q[start:end], keys, values, self.sinks[layer])).abs().max()
                    self.error = float("inf") if not error.isfinite() else max(self.error, error.item())
        self.runtime.commit(running)
        self.lengths = list(step.lengths)

    def take_back(self, tokens: int) -> None:
        for slot, length in enumerate(self.lengths):
            keep = max(0, length - tokens)
            self.runtime.truncate(slot, length, keep)
            self.lengths[slot] = keep
            for layer in self.seen:
                layer[slot] = layer[slot][0][:keep], layer[slot][1][:keep]

    def _draw(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, DIM, generator=self.draws)


def textbook(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Causal attention in float64: q `[t, q_heads, d]` are the last tokens of k, v `[n, kv_heads, d]`; sinks as in
    `LayerShape`."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,nhd->htn", q.double(), keys) * SCALE
    unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    weights = softmax(scores.masked_fill(unseen, -torch.inf), None if sinks is None else sinks.double()[:, None])
    return torch.einsum("htn,nhd->thd", weights, values)


def whole_parameters(composed: Composed, tokens: int) -> dict[str, Any] | None:
    """Parameters under which the row leaves nothing out of sequences of so many tokens; None where a part has none."""
    parameters: dict[str, Any] = {}
    for part in composed.build().all():
        own = part.whole(tokens)
        if own is None:
            return None
        parameters |= own
    return parameters


def check(
    method: Method,
    own_tokens: int | None = None,
    device: torch.device | None = None,
    whole_tokens: int = TOKENS,
    layers: int = 5,
    steps: tuple[int, int, int] = (13, 10, 9),
    **overrides: Any,
) -> Verdict:
    """Runs a row as it stands, and with the parameters under which it leaves nothing out. Seconds on a CPU.

    own_tokens: length of the sequences for the row's own parameters; left out, twice what its rule says it attends to.
    whole_tokens: of those with which nothing is left out. layers: of the model that is made up. steps: see `histories`.
    Raises what `compose` raises; an exception in a step is a problem of the verdict.
    """
    problems: list[str] = []

    def run(row: Composed, tokens: int, how: str) -> Checked | None:
        trial = Trial(row, device or torch.device("cpu"), layers)
        group = trial.runtime.groups[0]
        try:
            for turn in histories(tokens, steps):
                if isinstance(turn, tuple):
                    trial.step(turn)
                elif "all_tokens" in group.cache.config.provides:  # a window cannot bring back what it dropped
                    trial.take_back(turn)
            return Checked(trial.error, trial.counted.most_attended, max(trial.lengths), group.select.most())
        except Exception as error:
            problems.append(f"{how} a step fails: {type(error).__name__}: {error}")
            return None
        finally:
            trial.runtime.release()

    composed = compose(method, **overrides)
    equal = None
    whole = whole_parameters(composed, 2 * whole_tokens)
    if whole is not None:
        equal = run(compose(method, **{**overrides, **whole}), whole_tokens, "with nothing left out")
        if equal is not None and equal.error > BOUND:
            words = ", ".join(f"{name}={value}" for name, value in whole.items()) or "its own parameters"
            problems.append(f"with nothing left out ({words}) it differs from full attention by {equal.error:.2g}")
    most = composed.build().select.most()
    tokens = own_tokens or min(LONGEST, max(TOKENS, 2 * (most or 0)))
    own = run(composed, tokens, "as it stands")
    if own is not None:
        if composed.exact and own.error > BOUND:
            problems.append(f"it says that it is exact, and differs from full attention by {own.error:.2g}")
        if own.error == float("inf"):
            problems.append("it gives numbers that are not finite")
        if own.most is not None and own.attended > own.most:
            problems.append(f"a KV head attended to {own.attended:,} entries; its rule allows {own.most:,}")
    failed = Checked(float("inf"), 0, 0, most)
    return Verdict(method.name, composed.exact, whole, equal, own or failed, tuple(problems))


def histories(tokens: int, steps: tuple[int, int, int]) -> Iterator[tuple[int, ...] | int]:
    """What happens to two sequences of about so many tokens: new tokens of each, or a number of tokens taken back.

    steps: decode steps after the prompt, after a turn, and after tokens were taken back.
    """
    turns: tuple[tuple[int, ...] | int, ...] = (tokens * 3 // 4, tokens // 3), (5, tokens // 8), 6
    for turn, decoded in zip(turns, steps, strict=True):
        yield turn
        yield from [(1, 1)] * decoded
