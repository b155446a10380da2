"""What every answer begins with, its usage, and what only this engine can say of it."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from coattn._version import __version__
from coattn.engine.llm import LLM
from coattn.engine.request import RequestOutput
from coattn.serve.answer.tokens import token_texts
from coattn.serve.call import Order
from coattn.serve.errors import ApiError
from coattn.serve.schema.base import Sampling
from coattn.serve.sse import DONE, event, sign_of_life

Json = dict[str, Any]


class ChoiceAnswer(ABC):
    """Builds what chats and completions have in common: choices, whole or in chunks of a stream, and their usage."""

    prefix, kind, chunk_kind = "", "", ""

    def __init__(self, llm: LLM, model: str, body: Sampling, order: Order, top: int | None) -> None:
        """top: log-probabilities per token."""
        self.llm, self.texts, self.top, self._order = llm, token_texts(llm.tokenizer), top, order
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint(llm),
        }
        options = body.stream_options
        self._counted = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)
        self._progress = bool(body.return_progress)
        self._latest: dict[int, RequestOutput] = {}

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput) -> Json:
        """A whole answer."""

    @abstractmethod
    def _first(self, index: int, delta: RequestOutput) -> Json | None:
        """The choice of the chunk before the first piece of an answer, if there is one."""

    @abstractmethod
    def _part(self, index: int, delta: RequestOutput) -> Json | None:
        """The choice of a chunk with what is new; None where there is nothing to show."""

    @abstractmethod
    def _last(self, index: int, output: RequestOutput) -> Json:
        """The choice of the chunk that ends an answer."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The answer to a request that does not stream."""
        numbered = dict(enumerate(outputs))
        return {
            **self.head,
            "choices": [self._choice(index, each) for index, each in numbered.items()],
            "usage": self._usage(numbered),
            "coattn": about(self.llm, list(numbered.items())),
        }

    def waiting(self, read: int, whole: int) -> bytes:
        """What a stream says while nothing is new: how much of the prompts has been read."""
        said = sign_of_life(read, whole)
        if self._progress and not self._latest:
            said += event({**self._chunk([]), "prompt_progress": {"processed": read, "total": whole}})
        return said

    def delta(self, index: int, delta: RequestOutput) -> bytes:
        """Events of what is new of an answer."""
        data = b"" if index in self._latest else self._event(self._first(index, delta))
        self._latest[index] = delta
        data += self._event(self._part(index, delta))
        if delta.finish_reason is not None:
            data += self._event(self._last(index, delta), coattn=about(self.llm, [(index, delta)]))
        return data

    def failed(self, error: ApiError) -> bytes:
        """The events that end a stream which cannot be finished."""
        return event(error.body()) + DONE

    def end(self) -> bytes:
        """The events after all answers."""
        if not self._counted:
            return DONE
        return event({**self._chunk([]), "usage": self._usage(self._latest)}) + DONE

    def _chunk(self, choices: Sequence[Json]) -> Json:
        return {**self.head, "object": self.chunk_kind, "choices": list(choices)}

    def _event(self, choice: Json | None, **more: Any) -> bytes:
        if choice is None:
            return b""
        chunk = {**self._chunk([choice]), **more}
        if self._always:
            chunk["usage"] = self._usage(self._latest, sum(map(len, self._order.prompts)))
        elif self._counted:
            chunk["usage"] = None
        return event(chunk)

    def _usage(self, outputs: Mapping[int, RequestOutput], prompt: int | None = None) -> Json:
        """Over all answers; a prompt counts once however many answers it has. prompt: tokens, if not all have begun."""
        firsts = [each for index, each in outputs.items() if index % self._order.choices == 0]
        prompt = sum(each.prompt_tokens for each in firsts) if prompt is None else prompt
        new = sum(each.new_tokens for each in outputs.values())
        cached = sum(each.cached_tokens for each in firsts)
        nothing = ("reasoning_tokens", "audio_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
            "completion_tokens_details": dict.fromkeys(nothing, 0),
        }


def fingerprint(llm: LLM) -> str:
    """Changes when answers may: with the version, the model, the method and its parameters."""
    what = [__version__, llm.name, str(llm.model.dtype), llm.composed.describe()]
    return "fp_" + hashlib.sha256(json.dumps(what, default=str, sort_keys=True).encode()).hexdigest()[:12]


def about(llm: LLM, outputs: Sequence[tuple[int, RequestOutput]]) -> Json:
    """The object `coattn`: the method, and for each answer its times, its KV bytes per tier, its preemptions and, where
    the method is audited, the error that was measured."""
    row = llm.composed.describe()
    return {
        "method": row["method"],
        "exact": row["exact"],
        "choices": [
            {
                "index": index,
                "timings": {
                    "queue_ms": _ms(each.waited_s),
                    "first_token_ms": _ms(each.first_token_s),
                    "total_ms": _ms(each.total_s),
                    "tokens_per_s": None if each.tokens_per_s is None else round(each.tokens_per_s, 3),
                },
                "kv_bytes": dict(llm.runner.runtime.bytes_for(max(0, each.prompt_tokens + each.new_tokens - 1))),
                "preemptions": each.preemptions,
                **({} if each.audit is None else {"audit": each.audit}),
            }
            for index, each in outputs
        ],
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
