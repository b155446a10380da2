"""A prompt that has been read: its keys and values, on their way from one process to another.

Prefill-decode disaggregation: one process reads prompts (`prefill`), another answers them under any method
(`LLM.generate` takes a `Prefilled` for a prompt), and between them is a safetensors file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from coattn.cache.ledger import Ledger
from coattn.errors import InputError, UnsupportedError
from coattn.hf.families import positions, room
from coattn.hf.fingerprint import read_by as fingerprint
from coattn.hf.forward import Session
from coattn.method.row import Composed, compose
from coattn.method.table import METHODS
from coattn.part import check_count
from coattn.step.probe import Probe
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

QUERIES = 64
"""Last queries of a prompt that go with it: methods that choose by them choose as if they had read it themselves."""


@dataclass(frozen=True)
class Prefilled:
    """tokens: the prompt's ids. Of every layer k, v `[tokens, kv_heads, d]`, keys after RoPE, and its last queries."""

    tokens: tuple[int, ...]
    kv: tuple[tuple[Tensor, Tensor], ...]
    queries: tuple[Tensor, ...]
    """`[at most QUERIES, q_heads, d]` each."""
    scales: tuple[float, ...]
    logits: Tensor
    """float32 `[1, vocabulary]`, after the last token."""
    read_by: str
    """Fingerprint of the model that read it."""
    transferred: bool = False
    """Whether another process has read it for one request: it is let go of once it is stored, and shares like a prompt
    that was read here. A request that loses its slot afterwards reads its tokens itself."""

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file: `tokens`, `scales`, `logits`, and `k.N`, `v.N`, `q.N` of layer N."""
        named = {"tokens": torch.tensor(self.tokens), "scales": torch.tensor(self.scales, dtype=torch.float64)}
        named["logits"] = self.logits
        for i, ((k, v), q) in enumerate(zip(self.kv, self.queries, strict=True)):
            named |= {f"k.{i}": k, f"v.{i}": v, f"q.{i}": q}
        try:
            held = {name: x.contiguous().cpu() for name, x in named.items()}
            save_file(held, str(path), {"read_by": self.read_by})
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} cannot be written: {error}.", "Give another path.") from None

    @staticmethod
    def load(path: str | Path) -> Prefilled:
        """Reads such a file, into DRAM."""
        try:
            with safe_open(str(path), "pt") as file:
                named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                read_by = str((file.metadata() or {}).get("read_by", ""))
            layers = range(len(named["scales"]))
            made = Prefilled(
                tuple(named["tokens"].tolist()),
                tuple((named[f"k.{i}"], named[f"v.{i}"]) for i in layers),
                tuple(named[f"q.{i}"] for i in layers),
                tuple(named["scales"].tolist()),
                named["logits"],
                read_by,
            )
            if (fault := made.fault()) is not None:
                raise ValueError(fault)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is no prefilled prompt: {error}.", "Write one with Prefilled.save.") from None
        return made

    def fault(self) -> str | None:
        """Where its tensors do not belong together."""
        if not self.tokens or not all(type(token) is int for token in self.tokens):
            return "it has no tokens"
        if not len(self.kv) == len(self.queries) == len(self.scales):
            return "its layers are not of one number"
        for i, ((k, v), q) in enumerate(zip(self.kv, self.queries, strict=True)):
            if k.ndim != 3 or k.shape != v.shape or len(k) != len(self.tokens) or k.dtype != v.dtype:
                return f"the keys and values of layer {i} are not of its tokens"
            if q.ndim != 3 or not 1 <= len(q) <= len(k) or q.shape[2] != k.shape[2]:
                return f"the queries of layer {i} do not belong to its keys"
        if self.logits.ndim != 2 or len(self.logits) != 1:
            return "its logits are not of one token"
        return None

    def check(self, layers: list[LayerShape], read_by: str) -> None:
        """Raises InputError where another model has read it; read_by: the fingerprint of the model that is to go on."""
        if (fault := self.fault()) is not None:
            raise InputError(f"The prefilled prompt cannot be used: {fault}.", "Make it with `prefill`.")
        want = [(s.kv_heads, s.head_dim, s.q_heads, s.dtype) for s in layers]
        have = [(k.shape[1], k.shape[2], q.shape[1], k.dtype) for (k, _), q in zip(self.kv, self.queries, strict=True)]
        if want != have:
            raise InputError(
                f"The prefilled prompt is of {len(have)} layers of {have[0] if have else 'nothing'}, the model has "
                f"{len(want)} of {want[0]}.",
                "Read the prompt with the same model and dtype.",
            )
        if self.read_by != read_by:
            raise InputError(
                "The prefilled prompt was read by another model of the same shape.",
                "Read the prompt with the same weights, configuration and dtype.",
            )


def _ids(ids: Any) -> Tensor:
    """Token ids `[tokens]`, int64. Raises InputError for what is none."""
    try:
        tokens = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"The prompt is a {type(ids).__name__}, not token ids.", "Give token ids [n].") from None
    if tokens.ndim != 1 or not len(tokens):
        raise InputError(f"The prompt has the shape {list(tokens.shape)}.", "Give token ids [n].")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InputError(f"The prompt is of {str(tokens.dtype).removeprefix('torch.')} numbers.", "Give token ids [n].")
    return tokens.long()


class KeptKV(Probe):
    """Keeps what goes through a runtime: every key and value, and the last queries before each end.

    ends: where in the prompt, in tokens. device: where what is kept lies.
    """

    def __init__(
        self, layers: int, ends: Sequence[int], device: torch.device, on_layer: Callable[[], None] = lambda: None
    ) -> None:
        self.scales, self.device, self.on_layer = [1.0] * layers, device, on_layer
        self.kv: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(layers)]
        self.queries: dict[int, list[list[Tensor]]] = {end: [[] for _ in range(layers)] for end in ends}

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.scales[layer] = scale
        for part, x in zip(self.kv[layer], (k, v), strict=True):
            part.append(x.to(self.device))
        (start,) = step.history
        for end, kept in self.queries.items():
            first, last = max(end - QUERIES, start), min(end, start + len(q))
            if first < last:
                kept[layer].append(q[first - start : last - start].to(self.device, copy=True))

    def output(self, step: Step, layer: int, out: Tensor) -> None:
        self.on_layer()


@torch.inference_mode()
def read_prompt(
    session: Session,
    row: Composed,
    ledger: Ledger,
    tokens: Tensor,
    ends: Sequence[int],
    chunk: int,
    probes: list[Probe],
) -> dict[int, Tensor]:
    """Reads tokens `[n]` under an exact row, a chunk at a time, before the eyes of `probes`.

    -> by end: float32 logits `[1, vocabulary]` after so many tokens, on the model's device. Nothing stays stored.
    """
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < session.vocabulary:
        raise InputError(
            f"The prompt has ids from {int(tokens.min()):,} to {int(tokens.max()):,}, but the model has "
            f"{session.vocabulary:,} tokens.",
            "Encode it with the model's own tokenizer.",
        )
    runtime = Runtime(session.layers, row, ledger, 1, len(tokens), probes=probes, states=session.states)
    logits: dict[int, Tensor] = {}
    try:
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk].to(session.device)
            here = [end for end in set(ends) if start < end <= start + len(part)]
            rows = torch.tensor([end - start - 1 for end in here], device=session.device) if here else None
            running = runtime.begin(Step.of((0,), (start,), (len(part),)))
            positions = torch.arange(start, start + len(part), device=session.device)
            found = session.forward(runtime, running, part, positions, rows)
            if found is not None:
                logits |= {end: found[i : i + 1] for i, end in enumerate(here)}
            runtime.commit(running)
    finally:
        runtime.release()
    return logits


def refuse_states(session: Session) -> None:
    """Raises UnsupportedError for a model with states: keys and values are not all of a prompt."""
    if session.states:
        raise UnsupportedError(
            "Prompts of models whose layers have a state are not read by another process: the states do not travel.",
            "Let the engine that answers read them.",
        )


def prefill(
    model: PreTrainedModel, ids: Any, chunk: int = 2048, on_layer: Callable[[], None] = lambda: None
) -> Prefilled:
    """Reads a prompt `[tokens]` with exact attention, a chunk at a time. Nobody else may be using the model.

    on_layer: called after the attention of every layer of every chunk.
    """
    return prefill_ends(model, ids, None, chunk, "cpu", on_layer)[0]


@torch.inference_mode()
def prefill_ends(
    model: PreTrainedModel,
    ids: Any,
    ends: Sequence[int] | None = None,
    chunk: int = 2048,
    device: str | torch.device = "cpu",
    on_layer: Callable[[], None] = lambda: None,
) -> list[Prefilled]:
    """Reads a prompt once -> what it is after its first `ends[i]` tokens, for each; by default after all of them.

    The shorter ones share the memory of the longest. device: where they lie.
    """
    check_count("chunk", chunk, 1)
    if not hasattr(model, "config"):
        raise UnsupportedError(
            f"prefill() takes a model of Transformers, not {model!r}.",
            "Load it first: AutoModelForCausalLM.from_pretrained(...).",
        )
    tokens = _ids(ids)
    ends = [len(tokens)] if ends is None else list(ends)
    if not ends or not all(0 < end <= len(tokens) for end in ends):
        raise InputError(f"ends is {ends}, of a prompt of {len(tokens):,} tokens.", "Give lengths of its beginnings.")
    tokens = tokens[: max(ends)]
    room("the model", positions(model.config), len(tokens))
    with Session(model) as session:
        refuse_states(session)
        kept = KeptKV(len(session.layers), sorted(set(ends)), torch.device(device), on_layer)
        logits = read_prompt(session, compose(METHODS["full"]), Ledger(), tokens, ends, chunk, [kept])
    kv = [(torch.cat(k), torch.cat(v)) for k, v in kept.kv]
    return [
        Prefilled(
            tuple(tokens[:end].tolist()),
            tuple((k[:end], v[:end]) for k, v in kv),
            tuple(torch.cat(each) for each in kept.queries[end]),
            tuple(kept.scales),
            logits[end].to(device, copy=True),
            fingerprint(model),
        )
        for end in ends
    ]
