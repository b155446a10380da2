"""One forward call over packed tokens: sequences of any length side by side, no padding, no cache object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coattn.errors import UnsupportedError
from coattn.hf.ahead import Ahead
from coattn.hf.architectures import describe_states
from coattn.hf.attention import Attends, Call, ModelUser
from coattn.hf.experts import grouped
from coattn.hf.logits import head, logit_chunks
from coattn.hf.mixers import mixing
from coattn.hf.pipeline import PipelineStages
from coattn.hf.stored import first_of
from coattn.step.running import RunningStep

OnLogits = Callable[[int, Tensor], None]
"""Gets logits of some tokens of a text: `(index of the first, float32 [n, vocabulary])`."""


class Session(ModelUser, AbstractContextManager["Session"]):
    """A model whose attention runs in a runtime, from `__init__` to `close`.

    Not a conversation: `engine.session` has those. While it is open the model's own `generate` and `forward` are
    refused; afterwards, also after an exception inside, it is as it was. Sessions of several models may be open.
    """

    IN_USE = (
        "This model is in use already, by `coattn.attach`, a `coattn.Cache` or another engine.",
        "Leave the `with` block, or close the cache or the engine that uses it, first.",
    )
    CHANGED = ("under an engine", "Choose it before the engine is made or after it is closed.")

    def __init__(self, model: PreTrainedModel, pipeline: PipelineStages | None = None) -> None:
        """pipeline: of a model whose layers are divided between devices."""
        super().__init__(model)
        self.states = describe_states(model)
        """For the runtimes of its steps, which keep them."""
        self.pipeline = pipeline
        if pipeline is not None:
            pairs = zip(self.layers, pipeline.division.stages, strict=True)
            self.layers = [replace(shape, stage=stage) for shape, stage in pairs]
        self.decoder: Any = model.get_decoder()
        self.device = cast("torch.device", model.get_input_embeddings().weight.device)
        head_weight = first_of(model.get_output_embeddings())
        self.head_device: torch.device = self.device if head_weight is None else head_weight.device
        """Where logits are."""
        self.vocabulary = int(model.get_output_embeddings().out_features)
        self._call: Call = (None, None)
        self._looking = False
        self._undo = ExitStack()
        self._undo.enter_context(self.routed())
        self._undo.enter_context(mixing(self))
        self._undo.enter_context(grouped(model))

    @property
    def call(self) -> Call:
        if self._call[0] is None:
            raise UnsupportedError(
                "This model belongs to an open engine, so it cannot be called directly.",
                "Use the engine, or close it first.",
            )
        return self._call

    def storing(self) -> AbstractContextManager[object]:
        """The caller's mode, in which all its steps run."""
        return nullcontext()

    @torch.no_grad()
    def forward(
        self,
        runtime: Attends,
        running: RunningStep,
        ids: Tensor,
        positions: Tensor,
        rows: slice | Tensor | None,
        on_logits: Sequence[tuple[slice, OnLogits]] = (),
    ) -> Tensor | None:
        """ids, positions `[tokens]`, packed as the running step -> logits of some of them.

        rows: which tokens, n of them -> float32 `[n, vocabulary]`, where the head is; None computes no logits. All
        others are on the session's device. on_logits: who gets the logits of all tokens of a slice, some at a time.
        """
        with self.through():
            hidden = self.hidden(runtime, running, ids, positions)
            for part, call in on_logits:
                for start, logits in logit_chunks(self.model, hidden[part]):
                    call(start, logits)
            if rows is None:
                return None
            return head(self.model, hidden[rows.to(hidden.device) if isinstance(rows, Tensor) else rows])

    def through(self) -> AbstractContextManager[None]:
        """A call of `hidden`, and what follows it where the last layer lies, run inside this block."""
        return nullcontext() if self.pipeline is None else self.pipeline.through()

    @torch.no_grad()
    def hidden(self, runtime: Attends, running: RunningStep | None, ids: Tensor, positions: Tensor) -> Tensor:
        """Like `forward`, up to the model's head: `[tokens, hidden_size]`."""
        self.check_routed()
        with self.calling(runtime, running):
            out = self.decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        return cast("Tensor", out.last_hidden_state[0])

    @contextmanager
    def calling(self, runtime: Attends, running: RunningStep | None) -> Iterator[None]:
        """The model's modules may be called inside this block; `runtime` attends for them."""
        before, self._call = self._call, (runtime, running)
        try:
            yield
        finally:
            self._call = before

    def look_ahead(self) -> None:
        """From now on, runtimes that want queries one layer ahead hear them."""
        if not self._looking:
            self._undo.enter_context(Ahead(self.model).hooked(self))
            self._looking = True

    def close(self) -> None:
        """Leaves the model as it was."""
        self._undo.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def sampling_defaults(model: PreTrainedModel) -> dict[str, Any]:
    """temperature, top_p and top_k of the generation config, where it says that the model samples; else nothing."""
    config = model.generation_config
    if not getattr(config, "do_sample", False):
        return {}
    found = {name: getattr(config, name, None) for name in ("temperature", "top_p", "top_k")}
    return {"temperature": 1.0, **{name: value for name, value in found.items() if value is not None}}


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: what the generation config says, else the config, else the tokenizer."""
    for source in (model.generation_config, model.config, tokenizer):
        ends = getattr(source, "eos_token_id", None)
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else map(int, ends))
    return frozenset()
