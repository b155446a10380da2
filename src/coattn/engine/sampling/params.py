"""What a request asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from coattn.aliases import takes_aliases
from coattn.errors import ConfigError
from coattn.part import check_count, check_number

MAX_SEED = (1 << 64) - 1
DEFAULT_NEW_TOKENS = 2048
"""Of an answer, where nobody says: enough for nearly all, and an end for a model that repeats itself."""


@takes_aliases("SamplingParams")
@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued. Unknown names and values out of range are refused with a ConfigError.

    vLLM's `max_tokens` and `min_tokens` are `max_new_tokens` and `min_new_tokens`.

    The filters act in Transformers' order: repetition penalty, presence and frequency penalty, bias, temperature,
    top-k, top-p, min-p.
    """

    max_new_tokens: int | None = None
    """Left out, 2,048, or as many as there is room for."""
    temperature: float | None = None
    """0 is greedy; then top_p, top_k, min_p and seed change nothing. Left out, as the model's generation config says,
    if it samples; else 0. The same goes for top_p and top_k."""
    top_p: float | None = None
    """Keeps the most likely tokens that together reach this probability; 1 keeps all."""
    top_k: int | None = None
    """Keeps this many of the most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drops tokens less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the prompt and of the answer less likely."""
    presence_penalty: float = 0.0
    """Taken off the score of every token that is in the answer already; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off the score of a token once for every time that it is in the answer; -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the scores of single tokens: a mapping of token ids to numbers from -100 to 100, or pairs."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer. They are not part of its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own end tokens."""
    seed: int | None = None
    """The same seed gives the same draws, alone and in any batch."""
    logprobs: int | None = None
    """How many of the most likely tokens to report per token with their log-probability, besides the chosen one."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt, which is then read whole, whatever is stored, and shared with nobody."""
    ignore_eos: bool = False
    """Goes on after the model's end tokens."""
    feed: tuple[int, ...] = ()
    """Token ids that follow the prompt, one decode step each, whatever the model would say. The answer comes after
    them; the output, `max_new_tokens`, `min_new_tokens`, penalties, random numbers and a guide know it alone."""
    min_new_tokens: int = 0
    """Before so many tokens no end token can come and no stop string counts."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text; end tokens always are."""
    n: int = 1
    """Answers to one prompt, of `LLM.generate` and `LLM.chat`. At temperature 0 they are the same."""

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens, 1, unset=True)
        check_number("temperature", 0 if self.temperature is None else self.temperature, 0)
        check_number("top_p", 1 if self.top_p is None else self.top_p, 0, 1, above=True)
        check_count("top_k", self.top_k, 0, unset=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0, above=True)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_count("min_new_tokens", self.min_new_tokens, 0)
        check_count("n", self.n, 1)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {self.min_new_tokens:,}, but max_new_tokens is {self.max_new_tokens:,}.",
                "Raise max_new_tokens, or lower min_new_tokens.",
            )
        check_count("seed", self.seed, 0, MAX_SEED, unset=True)
        for name in ("logprobs", "prompt_logprobs"):
            check_count(name, getattr(self, name), 0, unset=True)
        for name in ("ignore_eos", "skip_special_tokens"):
            given = getattr(self, name)
            if not isinstance(given, bool):
                raise ConfigError(f"{name} is {given!r}, which is not a yes or no.", "Give True or False.")
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "feed", _ids("feed", self.feed))
        if self.feed and self.repetition_penalty != 1:
            raise ConfigError("feed and repetition_penalty do not go together.", "Leave one out.")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def check_model(self, vocabulary: int, has_text: bool) -> None:
        """Raises ConfigError for what a model of so many tokens, or one without a tokenizer, cannot do."""
        if self.stop and not has_text:
            raise ConfigError("Stop strings need text, but this engine has no tokenizer.", "Use stop_token_ids.")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocabulary:
                raise ConfigError(
                    f"{name} is {getattr(self, name):,}, but the model has {vocabulary:,} tokens.",
                    f"Set {name}={vocabulary} or less.",
                )
        wrong = next((token for token, _ in self.logit_bias if token >= vocabulary), None)
        if wrong is not None:
            raise ConfigError(
                f"logit_bias names token {wrong:,}, but the model has {vocabulary:,} tokens.",
                "Use ids of the model's own tokenizer.",
            )

    def choices(self) -> list[SamplingParams]:
        """One for each of the `n` answers; where there is a seed, each has its own."""
        seeds = [None if self.seed is None else (self.seed + i) & MAX_SEED for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    def over(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """What is left out here is as in `defaults`."""
        lacking = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **lacking) if lacking else self

    @property
    def greedy(self) -> bool:
        return not self.temperature


def _strings(value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(text, str) and text for text in found):
        raise ConfigError(
            f"stop is {value!r}, but must be strings of at least one character.", 'Write it like stop=("\\n\\n",).'
        )
    return found


def _ids(name: str, value: Any) -> tuple[int, ...]:
    found = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in found):
        raise ConfigError(f"{name} is {value!r}, but must be token ids.", "Give whole numbers of at least 0.")
    return found


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    hint = "Write it like logit_bias={1734: -100}."
    try:
        found = dict(pairs)
    except (TypeError, ValueError):
        raise ConfigError("logit_bias is not a mapping of token ids to numbers.", hint) from None
    for token, bias in found.items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ConfigError(f"logit_bias names {token!r}, which is not a token id.", hint)
        check_number(f"logit_bias of token {token}", bias, -100, 100)
    return tuple((token, float(found[token])) for token in sorted(found))
