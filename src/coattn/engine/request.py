"""A request on its way through the engine: what it asks, the steps that it is in, and what comes out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from coattn.auto.audit.tally import Tally
from coattn.engine.sampling.params import SamplingParams
from coattn.engine.store.prefix import PrefixCursor
from coattn.errors import BudgetError, CoattnError
from coattn.hf.prefilled import Prefilled

FinishReason = Literal["stop", "length", "error", "cancelled"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one position, by the model's own distribution before penalties and filters."""

    logprob: float
    """Of the chosen token."""
    top: tuple[tuple[int, float], ...] = ()
    """`(token id, log-probability)` of the most likely tokens, best first."""


@dataclass(eq=False, slots=True)
class Request:
    """Tokens, and how many of them the cache holds.

    A request decodes when exactly one of its tokens is not stored yet; else its tokens are read in chunks. So one that
    lost its memory reads prompt and output again and goes on where it was.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    """Tokens it may have in all, prompt included."""
    given: Prefilled | None = None
    """The prompt's keys and values, where it was read elsewhere."""
    priority: int = 0
    """Who has a lower number is served first."""
    deadline: float | None = None
    """When it fails unless it is done, on the clock of `time.perf_counter`."""
    salt: bytes = b""
    """Requests share what is stored only with those of the same salt."""
    session: int | None = None
    """The number of the session whose turn it is."""
    output: list[int] = field(default_factory=list)
    scored: list[TokenLogprobs | None] | None = None
    """What the model says of each token of the prompt, where it is asked; of the first it says nothing."""
    stored: int = 0
    cached: int | None = None
    """Tokens that were stored already when it first got a slot."""
    cursor: PrefixCursor | None = None
    """Where it stands among the stored blocks while it runs."""
    tallies: list[Tally] = field(default_factory=list)
    """What audits have found of it; one for each time that it ran."""
    slot: int | None = None
    """The number by which the cache knows it while it runs."""
    preemptions: int = 0
    alone: bool = False
    """Whether what it reads is read by itself, after a step with others has failed."""
    faults: int = 0
    """How often it has read its text again because a step failed."""
    finish_reason: FinishReason | None = None
    error: CoattnError | None = None
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    """When it first got a slot."""
    first: float | None = None
    """When its first token came."""
    ended: float | None = None

    @property
    def in_slot(self) -> int:
        """Its slot, which it has while it runs."""
        assert self.slot is not None
        return self.slot

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in line: by priority, then by arrival."""
        return self.priority, self.id

    @property
    def total(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def decodes(self) -> bool:
        return self.stored > 0 and self.total - self.stored == 1

    @property
    def prompt_read(self) -> int:
        """Tokens of its prompt that have been read: all if it has a token, though its slot may be another's by now."""
        return len(self.prompt) if self.output else min(self.stored, len(self.prompt))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def audit(self) -> dict[str, Any] | None:
        """All that was found of it, where it is audited."""
        if not self.tallies:
            return None
        first, *others = self.tallies
        return first.plus(others).summary()

    def tokens(self, start: int, end: int) -> list[int]:
        """Prompt and output as one sequence, from `start` to `end`."""
        border = len(self.prompt)
        return self.prompt[start:end] + self.output[max(0, start - border) : max(0, end - border)]


class PromptChunk(NamedTuple):
    """The tokens of `request` up to `end`, which are to be stored. Only the last chunk is followed by a new token."""

    request: Request
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.request.total

    @property
    def size(self) -> int:
        """Tokens that are read."""
        return self.end - self.request.stored


class Forward(NamedTuple):
    """One forward call: chunks of prompts, and one token for each of `requests`."""

    chunks: tuple[PromptChunk, ...] = ()
    requests: tuple[Request, ...] = ()


class Refuse(NamedTuple):
    """This request runs alone and still does not fit."""

    request: Request
    error: BudgetError


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """An answer, or (from `stream` and handles) the part of it that is new."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    """The end token is included if there was one; it is not part of `text`."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per token of `token_ids`, where `SamplingParams.logprobs` asked for them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry per token of the prompt, where `SamplingParams.prompt_logprobs` asked for them; None for the first."""
    finish_reason: FinishReason | None = None
    """None while more is to come; `length`: max_new_tokens or the longest sequence was reached."""
    stop_string: str | None = None
    """The stop string that ended the answer, if one did."""
    error: CoattnError | None = None
    """Why, where finish_reason is `error`."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    """In all, also in a partial output."""
    preemptions: int = 0
    """How often its memory was given to older requests and its tokens were read again."""
    cached_tokens: int = 0
    """Of the prompt: what was stored already, by another request or by an earlier turn of its session."""
    waited_s: float | None = None
    """Until it first got a slot."""
    first_token_s: float | None = None
    """Until its first token, waiting included."""
    total_s: float | None = None
    audit: dict[str, Any] | None = None
    """At the end, under a method that is audited: the error that was measured, its interval and what is allowed; see
    `coattn.auto.audit.tally.Tally.summary`. `over_target` says by how much it is larger, where it is."""

    index: int = 0
    """Which of the answers to its prompt this is."""
    others: tuple[RequestOutput, ...] = ()
    """The further answers, where `SamplingParams.n` asked for some."""

    @property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """All answers to the prompt, the first included: `outputs[0].text`, as vLLM has it."""
        return (self, *self.others)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first per second; None when there were fewer than two."""
        if self.total_s is None or self.first_token_s is None or self.new_tokens < 2:
            return None
        return (self.new_tokens - 1) / max(self.total_s - self.first_token_s, 1e-9)


def join_choices(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """The answers to one prompt as one: the first, with the others."""
    first, *others = outputs
    return replace(first, others=tuple(replace(each, index=i + 1) for i, each in enumerate(others)))
