"""Modules with a state instead of a KV cache, in a step of packed tokens: each reads and writes the state's rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from coattn.cache.states import StateStore
from coattn.errors import UnsupportedError
from coattn.hf.attention import ModelUser
from coattn.hf.fuse.forms import replaced
from coattn.hf.probe import Mixer, mixers_of
from coattn.types import Phase, Step

CACHES = ("cache_params", "past_key_values")
"""What mixers call the cache that they are given."""


class States(Protocol):
    """Where states lie: a `StateStore`."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name, `[rows, ...]`."""

    def table(self, seqs: int) -> tuple[Tensor, Tensor]:
        """Which row each sequence's state is, and which one becomes it, int32 `[seqs]` each."""


class OneLayer(Cache):  # type: ignore[misc]
    """What a mixer takes for a cache: its own layer's states, changed in place."""

    def __init__(self, mixer: Mixer, states: dict[str, Tensor], known: bool) -> None:
        """states: by name, `[batch, ...]`. known: whether they are those after some text."""
        numbers = {number for _, number, _, _ in mixer.states}
        layer = LinearAttentionLayer(number_of_states=1 + max(numbers))
        for kind, number, _, _ in mixer.states:
            x = states[f"{mixer.index}.{kind}.{number}"]
            getattr(layer, f"{kind}_states")[number] = x
            getattr(layer, f"is_{kind}_states_initialized")[number] = True
            layer.has_previous_state[number] = known
            if kind == "conv":
                layer.conv_kernel_size[number] = x.shape[-1]
            layer.dtype, layer.device = x.dtype, x.device
        super().__init__(layers=[layer] * (mixer.index + 1))
        self.own = layer

    def changed(self, kind: str, number: int) -> Tensor:
        return cast("Tensor", getattr(self.own, f"{kind}_states")[number])


class MixerForm:
    """Stands in for a mixer's forward while an engine has the model: decode tokens as a batch, prompts one by one."""

    def __init__(self, session: ModelUser, mixer: Mixer, module: nn.Module) -> None:
        self.session, self.mixer, self.own = session, mixer, module.forward
        self.names = [f"{mixer.index}.{kind}.{number}" for kind, number, _, _ in mixer.states]
        taken = inspect.signature(self.own).parameters
        self.cache = next(name for name in CACHES if name in taken)

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        hidden: Tensor = args[0] if args else options["hidden_states"]
        runtime, running = self.session.call
        store: StateStore | None = getattr(runtime, "states", None)
        if store is None or running is None:
            raise UnsupportedError(
                "This command runs the layers that attend alone, and the model has others with a state.",
                "Use coattn.LLM, coattn.attach or coattn.Cache.",
            )
        made, start = list[Tensor](), 0
        for part in running.parts:
            given, start = hidden[:, start : start + part.tokens], start + part.tokens
            made += [self.decode(store, given)] if part.phase is Phase.DECODE else self._read(store, part, given)
        return made[0] if len(made) == 1 else torch.cat(made, 1)

    def decode(self, store: States, hidden: Tensor) -> Tensor:
        """hidden `[1, seqs, hidden_size]`, a token of each sequence. Tensors only, so that it can be captured."""
        read, write = store.table(hidden.shape[1])
        cache = OneLayer(self.mixer, {name: store.tensors[name].index_select(0, read) for name in self.names}, True)
        out = self._run(hidden.transpose(0, 1), cache)
        for name, (kind, number, _, _) in zip(self.names, self.mixer.states, strict=True):
            store.tensors[name].index_copy_(0, write.long(), cache.changed(kind, number))
        return out.transpose(0, 1)

    def _read(self, store: StateStore, part: Step, hidden: Tensor) -> list[Tensor]:
        """hidden `[1, tokens, hidden_size]`, the packed chunks of prompts."""
        made = []
        for slot, history, (start, end) in zip(part.slots, part.history, part.spans, strict=True):
            if start == end:
                continue
            read, write = store.rows(slot)
            rows = {name: store.tensors[name][write : write + 1] for name in self.names}
            for name, row in rows.items():
                row.copy_(store.tensors[name][read : read + 1]) if history else row.zero_()
            made.append(self._run(hidden[:, start:end], OneLayer(self.mixer, rows, bool(history))))
        return made

    def _run(self, hidden: Tensor, cache: OneLayer) -> Tensor:
        return cast("Tensor", self.own(hidden, **{self.cache: cache}))


@contextmanager
def mixing(session: ModelUser) -> Iterator[None]:
    """The model's mixers run in steps of the session inside this block."""
    decoder = session.model.get_decoder()
    with ExitStack() as undo:
        for mixer in mixers_of(session.model):
            module = decoder.get_submodule(mixer.name)
            undo.enter_context(replaced(module, MixerForm(session, mixer, module)))
        yield
