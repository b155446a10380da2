"""What every answer begins with, its usage, and what only this engine can say of it."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from coattn._version import __version__
from coattn.engine.llm import LLM
from coattn.engine.request import RequestOutput

Json = dict[str, Any]


def head(llm: LLM, prefix: str, kind: str, model: str) -> Json:
    """id, object, created, model, system_fingerprint."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint(llm),
    }


def fingerprint(llm: LLM) -> str:
    """Changes when answers may: with the version, the model, the method and its parameters."""
    what = [__version__, llm.name, str(llm.model.dtype), llm.composed.describe()]
    return "fp_" + hashlib.sha256(json.dumps(what, default=str, sort_keys=True).encode()).hexdigest()[:12]


def usage(prompt: int, new: int, cached: int) -> Json:
    """Tokens; cached: those of the prompts that were stored already."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def total_usage(outputs: Sequence[RequestOutput], choices: int) -> Json:
    """Over all answers; a prompt counts once however many answers it has."""
    return usage(
        sum(each.prompt_tokens for each in outputs[::choices]),
        sum(each.new_tokens for each in outputs),
        total_cached(dict(enumerate(outputs)), choices),
    )


def total_cached(outputs: Mapping[int, RequestOutput], choices: int) -> int:
    """Prompt tokens that were stored already, by the first answer to each prompt."""
    return sum(each.cached_tokens for index, each in outputs.items() if index % choices == 0)


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
                "kv_bytes": dict(llm.runner.needs(max(0, each.prompt_tokens + each.new_tokens - 1))),
                "preemptions": each.preemptions,
                **({} if each.audit is None else {"audit": each.audit}),
            }
            for index, each in outputs
        ],
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
