"""The CPU one layer ahead of the GPU (ScoutAttention, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coattn.ops.merge import merge_states
from coattn.part import check_count, check_number
from coattn.place.base import Call, Result, State
from coattn.schedule.same_layer import SameLayer
from coattn.schedule.second_look import SecondLook
from coattn.state import AttnState
from coattn.store.frame import Recording
from coattn.types import BlockList, Selection, Step


@dataclass
class Started:
    """What the CPU does for a layer whose turn has not come."""

    q: Tensor
    """The predicted query, `[seqs, 1, q_heads, d]`."""
    step: Step
    far: BlockList | None
    results: list[Result]
    made: Any = None
    """In a recorded step: the event after which q is there."""
    again: BlockList | None = None
    """What has to be attended to once more, with the real query."""


@dataclass
class LayerAhead(SameLayer):
    """Host places start on a layer while the GPU is at the layer before, with the query predicted there.

    A layer then merges what was started for it with what its real query finds near. Layers whose query nobody has
    predicted, the first above all, run like `same_layer`.
    """

    name = "layer_ahead"
    needs = SameLayer.needs | {"far"}
    ahead = True
    help_text = {
        "bound": "least cosine of predicted and real query, over the query heads of a KV head, below which the CPU's "
        "part is computed again with the real one; -1: never",
        "ahead_from": "first layer that is started ahead; queries of the very first are foreseen badly in many models",
    }

    bound: float = 0.8
    ahead_from: int = 1
    checked: int = field(init=False, default=0)
    """KV heads, over sequences, layers and steps, whose prediction was compared with the real query; in recorded steps
    `notes` counts them."""
    recomputed: int = field(init=False, default=0)
    """Of those, the ones whose CPU part was computed again."""
    _started: dict[int, Started] = field(init=False, repr=False, default_factory=dict)
    _streams: list[Any] = field(init=False, repr=False, default_factory=list)
    """Two, for every other layer: while one waits for the CPU's answer, the other makes the next query."""
    _second: SecondLook = field(init=False, repr=False, default_factory=SecondLook)

    def __post_init__(self) -> None:
        check_number("bound", self.bound, -1, 1)
        check_count("ahead_from", self.ahead_from, 1)

    def is_exact(self) -> bool:
        return self.bound >= 1

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"bound": 1.0}

    def foresees(self, layer: int) -> bool:
        return layer >= self.ahead_from

    @contextmanager
    def aside(self, layer: int, hidden: Tensor, recording: Recording | None) -> Iterator[None]:
        """In a recorded step all of this is beside the layer before; `launch` waits for it."""
        if recording is None or hidden.device.type != "cuda":
            yield
            return
        if not self._streams:
            self._streams = [torch.cuda.Stream(hidden.device) for _ in range(2)]  # type: ignore[no-untyped-call]
        stream = self._streams[layer % 2]
        stream.wait_stream(torch.cuda.current_stream(hidden.device))
        hidden.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def foresee(self, call: Call, picked: Selection) -> None:
        places = [place for place in self.needed(picked) if place.asynchronous and picked.far is not None]
        made = None
        if call.q.device.type == "cuda" and _recorded(call):
            made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            made.record()
        if call.store.recording is not None:
            call.store.recording.foreseen.add(call.layer)
        results = [place.start(call, picked) for place in places]
        self._started[call.layer] = Started(call.q, call.step, picked.far, results, made)

    def amend(self, call: Call, picked: Selection) -> Selection:
        started = self._started.get(call.layer)
        if started is None or started.step is not call.step or _recorded(call):
            return picked
        if self.bound <= -1:
            return Selection(picked.near, started.far)
        below = self._below(started.q, call)
        self.checked += below.numel()
        self.recomputed += int(below.sum())
        started.again = _some(picked.far, below)
        return Selection(picked.near, _either(started.far, picked.far, below))

    def launch(self, call: Call, picked: Selection) -> list[State]:
        started = self._started.pop(call.layer, None)
        if started is None or started.step is not call.step:
            return super().launch(call, picked)
        if _recorded(call):
            return self._launch_recorded(call, picked, started)
        inline = [place.run(call, picked) for place in self.needed(picked) if not place.asynchronous]
        states = inline + [fetch() for fetch in started.results]
        if self.bound <= -1:
            return states
        below = self._below(started.q, call).repeat_interleave(call.shape.q_heads // call.shape.kv_heads, 1)
        redo = Selection(None, started.again)
        real = [place.run(call, redo) for place in self.places if place.asynchronous]
        return [*inline, *(_instead(old, below) for old in states[len(inline) :]), *real]

    def notes(self) -> dict[str, int]:
        checked, recomputed = self._second.counts()
        return {"checked_heads": self.checked + checked, "recomputed_heads": self.recomputed + recomputed}

    def release(self) -> None:
        self._started.clear()
        self._second = SecondLook()

    def _launch_recorded(self, call: Call, picked: Selection, started: Started) -> list[State]:
        """Nothing here waits on the host: whether a head is attended again is known on the GPU alone."""
        if started.made is not None:
            # what is near may have been picked with the foreseen query too
            torch.cuda.current_stream(call.q.device).wait_event(started.made)
        again = None
        if self.bound > -1 and picked.far is not None:
            place = next(place for place in self.places if place.asynchronous)
            again = self._second.start(call, place, picked.far, started.q, started.made, self.bound)
        states = [place.run(call, picked) for place in self.needed(picked) if not place.asynchronous]
        parts = [fetch() for fetch in started.results]
        return states + (parts if again is None else [again(part) for part in parts])

    def _below(self, predicted: Tensor, call: Call) -> Tensor:
        """`[seqs, kv_heads]`: whether any query head of the group was predicted worse than the bound allows."""
        cosine = torch.cosine_similarity(predicted[:, 0].float(), call.q[:, 0].float(), dim=-1)
        return cosine.view(len(cosine), call.shape.kv_heads, -1).amin(-1) < self.bound


def _recorded(call: Call) -> bool:
    return call.store.recording is not None


def _instead(state: State, gone: Tensor) -> State:
    """A state without the query heads `[seqs, q_heads]` for which another one stands."""
    whole = merge_states([state])
    empty = AttnState.empty(whole.out)
    gone = gone[:, None]
    return AttnState(
        torch.where(gone[..., None], empty.out, whole.out),
        torch.where(gone, empty.lse, whole.lse),
    )


def _some(far: BlockList | None, wanted: Tensor) -> BlockList | None:
    """The lists of the KV heads `[seqs, kv_heads]` that are wanted; None where nothing is left."""
    if far is None:
        return None
    tokens = far.tokens.expand(wanted.shape).where(wanted.to(far.tokens.device), 0).contiguous()
    longest = int(tokens.max())
    table = far.table.expand(*wanted.shape, -1).contiguous()
    return BlockList(table, tokens, longest, far.memory, far.owners) if longest else None


def _either(first: BlockList | None, second: BlockList | None, other: Tensor) -> BlockList | None:
    """The second's lists where `other` `[seqs, kv_heads]`, else the first's."""
    kept, instead = _some(first, ~other), _some(second, other)
    if kept is None or instead is None:
        return instead if kept is None else kept
    width = max(kept.table.shape[-1], instead.table.shape[-1])
    tables = [torch.nn.functional.pad(part.table, (0, width - part.table.shape[-1])) for part in (kept, instead)]
    table = torch.where(other.to(tables[0].device)[..., None], tables[1], tables[0])
    return BlockList(table.contiguous(), kept.tokens + instead.tokens, max(kept.longest, instead.longest))
