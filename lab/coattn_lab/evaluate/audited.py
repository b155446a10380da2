"""What an audit of single cases says beside the truth: every layer, KV head and step measured."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.auto.audit.measure import Case, attend_all, measure
from coattn.auto.audit.tally import Tally
from coattn.errors import InputError
from coattn.step.probe import Probe
from coattn.tools.evaluate.forced import Progress, force
from coattn.types import Phase, Selection, Step
from coattn_lab.evaluate.ratios import Ratios, ratio

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from coattn.method.row import Composed
    from coattn.parts.call import AttentionCall
    from coattn.parts.executor.base import State
    from coattn.step.runtime import LayerGroup, Runtime

REDRAWN = 1000
"""Audits that are drawn again from all cases of a run, to see how often their intervals hold the truth."""


@dataclass
class Exhaustive(Probe):
    """Measures every layer, KV head and sequence of every decode step; keeps a second KV cache to do so."""

    found: list[Tensor] = field(default_factory=list)
    """Per decode step and layer in order: `[seqs, kv_heads, 3]` float64: error, missed and estimated mass."""
    entries: list[float] = field(default_factory=list)
    """Per decode step: entries in DRAM that a KV head attended to, the mean over sequences."""
    seconds: list[float] = field(default_factory=list)
    """Per decode step: what attention took in all layers."""
    report: dict[str, Any] = field(default_factory=dict)
    """What the audit said last."""
    _kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(init=False, repr=False, default_factory=dict)
    _runtime: Runtime = field(init=False, repr=False)
    _noted: tuple[Tensor, Tensor, Tensor] | None = field(init=False, repr=False, default=None)
    _scale: float = field(init=False, repr=False, default=1.0)
    _since: float = field(init=False, repr=False, default=0.0)

    def open(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        for slot, (start, end) in zip(step.slots, step.spans, strict=True):
            own = self._kv.get((slot, layer))
            new = k[start:end].clone(), v[start:end].clone()
            self._kv[slot, layer] = new if own is None else (torch.cat([own[0], new[0]]), torch.cat([own[1], new[1]]))
        self._scale, self._noted = scale, None
        self._since = _now(q)

    def selected(self, group: LayerGroup, call: AttentionCall, selection: Selection, states: Sequence[State]) -> None:
        lse = {work.kind: state.lse for state, work in zip(states, selection.works, strict=True)}
        if "scored" in lse:
            far = lse.pop("scored")
            self._noted = call.q[:, 0], torch.cat([*lse.values(), far[:, :-1]], 1).logsumexp(1), far[:, -1]

    def output(self, step: Step, layer: int, out: Tensor) -> None:
        if step.phase is not Phase.DECODE or self._noted is None:
            return
        took = _now(out) - self._since
        if layer == min(self._runtime.groups[-1].cache.spec.layers):
            self.seconds.append(0.0)
        self.seconds[-1] += took
        shape, (q, attended, left) = self._runtime.layers[layer], self._noted
        rows = []
        for row, slot in enumerate(step.slots):
            asked, given, known, rest = (
                x[row].float().view(shape.kv_heads, -1, *x.shape[2:]) for x in (q, out, attended, left)
            )
            sinks = shape.sink_logits if shape.sink_logits is None else shape.sink_logits.view(shape.kv_heads, -1)
            case = Case(asked, given, known, rest, self._scale, shape.softcap, sinks)
            found = measure(case, attend_all(case, *self._kv[slot, layer]))
            rows.append(torch.stack([found.error, found.missed, found.estimated], -1).cpu())
        self.found.append(torch.stack(rows))

    def commit(self, step: Step) -> None:
        if step.phase is Phase.DECODE and self._noted is not None:
            said = self._runtime.report(step)
            self.entries.append(said["attended_host"] / step.seqs)
            self.report = said["audit"]

    def cases(self) -> Tensor:
        """`[steps, seqs, layers, kv_heads, 3]`."""
        found = torch.stack(self.found)
        return found.view(len(self.seconds), -1, *found.shape[1:]).transpose(1, 2)


def _now(like: Tensor) -> float:
    if like.device.type == "cuda":
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


def run(
    model: PreTrainedModel, windows: Tensor, prefill: int, composed: Composed, progress: Progress | None
) -> dict[str, Any]:
    """Windows `[windows, tokens]` under a row that is audited -> what was promised, audited and true."""
    probe = Exhaustive()
    params = composed.params
    force(
        model, windows, prefill, composed.method, score_prefill=False, probes=[probe], progress=progress, **params
    )  # the logits are not needed: attention alone is promised
    if not probe.found:
        raise InputError(
            f"With {windows.shape[1]:,} tokens nothing lay in DRAM, so there is nothing to audit.",
            "Give a larger --prefill.",
        )
    cases, target = probe.cases(), 1 - params["quality"]
    audit = probe.report
    truth = float(cases[..., 0].mean()), float(cases[..., 1].mean())
    covered = redraw(cases, target, truth)
    half = sorted(probe.seconds)[len(probe.seconds) // 2]
    return {
        "quality": params["quality"],
        "error_target": round(target, 6),
        "error": truth[0],
        "error_largest": float(cases[..., 0].max()),
        "within_target": float((cases[..., 0] <= target).double().mean()),
        "error_audited": audit["error"],
        "error_95": audit["error_95"],
        "missed_mass": truth[1],
        "missed_mass_audited": audit["missed_mass"],
        "missed_mass_95": audit["missed_mass_95"],
        "estimated_mass": float(cases[..., 2].mean()),
        "cases": cases[..., 0].numel(),
        "audits": audit["audits"],
        "error_covered": covered[0],
        "missed_mass_covered": covered[1],
        **held_back(cases),
        "wait": audit["wait"],
        "entries": sum(probe.entries) / len(probe.entries),
        "attention_ms": 1e3 * half,
    }


def redraw(cases: Tensor, target: float, truth: tuple[float, float]) -> tuple[float | None, float | None]:
    """Of audits drawn anew, one case a step, the share whose 95% interval holds the truth: of error, of missed mass.
    None: so few steps have no interval."""
    draws, inside, known = random.Random(7), [0, 0], [False, False]
    steps = cases.flatten(1, 3).tolist()
    for _ in range(REDRAWN):
        tally = Tally(target)
        for step in steps:
            tally.add(*draws.choice(step))
        error, missed = tally.error_interval(), tally.missed_interval()
        for i, (found, true) in enumerate(zip((error, missed), truth, strict=True)):
            if found is not None:
                known[i] = True
                inside[i] += found[0] <= true <= found[1]
    held = [count / REDRAWN if there else None for count, there in zip(inside, known, strict=True)]
    return held[0], held[1]


def _halves(cases: Tensor) -> tuple[Tensor, Tensor]:
    middle = math.ceil(len(cases) / 2)
    return cases[:middle], cases[middle:]


def held_back(cases: Tensor) -> dict[str, Any]:
    """The interval of missed over estimated mass from one part of the cases, and the share of the others within it.

    The first window tells, the others are held back; of a single window, its first half tells.
    """
    windows = cases.shape[1]
    known, others = (cases[:, :1], cases[:, 1:]) if windows > 1 else _halves(cases)
    ratios, draws = Ratios(), random.Random(8)
    flat = known.flatten(0, 3).tolist()
    for _, missed, estimated in draws.sample(flat, min(len(flat), 1024)):
        ratios.add(missed, estimated)
    found = ratios.interval()
    if found is None:
        return {"mass_ratio_95": None, "mass_ratio_covered": None, "held_back": 0}
    rest = [ratio(missed, estimated) for _, missed, estimated in others.flatten(0, 3).tolist()]
    inside = sum(found[0] <= x <= found[1] for x in rest)
    return {"mass_ratio_95": list(found), "mass_ratio_covered": inside / len(rest), "held_back": len(rest)}
