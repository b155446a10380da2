"""Fields of a request -> `SamplingParams`, whose defaults hold for what is left out."""

from __future__ import annotations

from coattn.engine.llm import LLM
from coattn.engine.sampling.params import MAX_SEED, SamplingParams
from coattn.serve.errors import invalid
from coattn.serve.prompt import too_long
from coattn.serve.schema.base import Sampling
from coattn.serve.schema.foreign import take
from coattn.serve.settings import Settings

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
SAME = ("temperature", "min_p", *PENALTIES, "stop_token_ids", "ignore_eos")
"""Fields that `SamplingParams` has under the same name."""
SMALLEST = 1e-9
"""For top_p 0, which means the likeliest token alone."""


def check_fields(body: Sampling, settings: Settings, prompts: int) -> int:
    """Refuses what is beyond this server's limits, takes what has another name here -> answers to each prompt."""
    take(body)
    choices = body.n or 1
    if choices * prompts > settings.max_choices:
        raise invalid("n", f"This asks for {choices * prompts:,} answers, but {settings.max_choices} is the most.")
    stops = _stops(body)
    if len(stops) > settings.max_stops:
        raise invalid("stop", f"There are {len(stops)} stop strings, but {settings.max_stops} is the most.")
    if any(not stop or len(stop) > settings.max_stop_length for stop in stops):
        raise invalid("stop", f"A stop string has 1 to {settings.max_stop_length:,} characters.")
    if body.session_id is not None and choices * prompts > 1:
        raise invalid("session_id", "A session has one prompt and one answer at a time.")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream: true.")
    return choices


def params(
    body: Sampling,
    llm: LLM,
    longest: int,
    tokens: int | None,
    top: int | None,
    special: bool = False,
) -> SamplingParams:
    """longest: tokens of the longest prompt; tokens: of the answer, if given; top: log-probabilities per token.

    special: special tokens are part of the text.
    """
    room = llm.max_length - longest
    if tokens is not None and tokens > room:
        both = f"{longest:,} and the answer may have {tokens:,}, which is {longest + tokens:,} in all"
        raise too_long(llm, "max_tokens", f"The prompt has {both}.")
    most = room if tokens is None else tokens
    if (body.min_tokens or 0) > most:
        raise invalid("min_tokens", f"min_tokens is {body.min_tokens:,}, but the answer has {most:,} tokens at most.")
    return SamplingParams(
        **{name: getattr(body, name) for name in SAME if getattr(body, name) is not None},
        max_new_tokens=tokens,
        min_new_tokens=body.min_tokens or 0,
        top_p=None if body.top_p is None else max(body.top_p, SMALLEST),
        top_k=None if body.top_k is None else max(0, body.top_k),
        logit_bias=tuple(_biases(body, llm.vocabulary)),
        stop=_stops(body),
        seed=None if body.seed is None else body.seed & MAX_SEED,
        logprobs=None if top is None else min(top, llm.vocabulary),
        skip_special_tokens=not special,
    )


def _stops(body: Sampling) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _biases(body: Sampling, vocabulary: int) -> list[tuple[int, float]]:
    given = body.logit_bias or {}
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 12 and int(name) < vocabulary):
            said = f"logit_bias names {name[:40]!r}, which is not a token id below {vocabulary:,}."
            raise invalid("logit_bias", said)
    return [(int(name), value) for name, value in given.items()]
