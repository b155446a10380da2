"""Prompts as people give them: text, token ids, chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

from torch import Tensor

from coattn.engine.sampling.params import SamplingParams
from coattn.errors import ConfigError, InputError
from coattn.hf.prefilled import Prefilled

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Tensor | Prefilled
"""Text as it is; token ids; chat messages, which go through the model's chat template; a prompt read elsewhere; or as
vLLM takes them, `{"prompt": text}` and `{"prompt_token_ids": ids}`."""

HOW = "Give text, a list of token ids, or a list of chat messages with role and content."


class PromptReader(Protocol):
    """Has prompts read by other processes: see `coattn.transfer.RemotePrefill`."""

    @property
    def threads(self) -> Executor:
        """On which an event loop waits for `read`."""

    @property
    def read(self) -> Callable[..., Prefilled | list[int]]:
        """A prompt -> the prompt that was read elsewhere, or its token ids."""

    def report(self) -> dict[str, int]:
        """Prompts and tokens that were read elsewhere, and how often that failed."""


def split(prompts: Any) -> list[Prompt]:
    """One prompt or several -> a list of prompts."""
    if isinstance(prompts, str | Tensor | Prefilled):
        return [prompts]
    if _is_wrapped(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InputError(f"The prompts are a {type(prompts).__name__}.", HOW)
    if not prompts:
        raise InputError("There are no prompts.", HOW)
    ids = set(map(type, prompts)) == {int} or all(_is_id(item) for item in prompts)
    if ids or (is_chat(prompts) and not any(map(_is_wrapped, prompts))):
        return [prompts]
    return [next(iter(item.values())) if _is_wrapped(item) else item for item in prompts]


def is_chat(prompt: Any) -> bool:
    """Whether it is a list of messages, whatever they hold."""
    return isinstance(prompt, Sequence) and all(isinstance(item, Mapping) for item in prompt)


def _is_wrapped(prompt: Any) -> bool:
    """Whether it is a prompt as vLLM takes it, with its kind."""
    return isinstance(prompt, Mapping) and prompt.keys() in ({"prompt"}, {"prompt_token_ids"})


def spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One set of parameters for all, or one each -> one each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    found = list(params) if isinstance(params, Sequence) else [params]
    wrong = next((each for each in found if not isinstance(each, SamplingParams)), None)
    if wrong is not None:
        raise ConfigError(f"params holds a {type(wrong).__name__}.", "Give coattn.SamplingParams(...).")
    if len(found) != count:
        raise ConfigError(
            f"There are {count} prompts, but {len(found)} sets of parameters.", "Give one for all, or one for each."
        )
    return found


def encode(prompt: Any, tokenizer: Any, vocabulary: int) -> list[int]:
    """A prompt -> its token ids, checked against the size of the vocabulary."""
    ids = _encode(prompt, tokenizer)
    if not ids:
        raise InputError("The prompt is empty.", "Give at least one token; a beginning-of-text token will do.")
    if min(ids) < 0 or max(ids) >= vocabulary:
        wrong = next(i for i in ids if not 0 <= i < vocabulary)
        raise InputError(
            f"Token id {wrong} is not in the model's vocabulary of {vocabulary:,}.",
            "Encode the prompt with the model's own tokenizer.",
        )
    return ids


def _encode(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, Prefilled):
        return list(prompt.tokens)
    if isinstance(prompt, Tensor):
        if prompt.ndim != 1 or prompt.is_floating_point() or prompt.is_complex():
            raise InputError(f"The prompt is a tensor of {prompt.dtype} {list(prompt.shape)}.", "Give token ids [n].")
        return [int(i) for i in prompt.tolist()]
    if isinstance(prompt, str):
        return _ids(prompt, tokenizer)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InputError(f"A prompt is a {type(prompt).__name__}.", HOW)
    if set(map(type, prompt)) == {int}:  # a turn checks all that was said before, too
        return list(prompt)
    if all(_is_id(item) for item in prompt):
        return [int(i) for i in prompt]
    if is_chat(prompt):
        return encode_chat(prompt, tokenizer)
    raise InputError("A prompt mixes things that do not belong together.", HOW)


def encode_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_generation_prompt: bool = True, **options: Any
) -> list[int]:
    """Messages through the model's chat template -> token ids. options: what the template may ask for."""
    text = render_chat(messages, tokenizer, add_generation_prompt=add_generation_prompt, **options)
    return encode_text(text, tokenizer)


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """Token ids of a text that does not begin a prompt, or has all its special tokens already."""
    return _ids(text, tokenizer, add_special_tokens=False)


def _ids(text: str, tokenizer: Any, **options: Any) -> list[int]:
    try:
        return [int(i) for i in _known(tokenizer)(text, verbose=False, **options)["input_ids"]]
    except TypeError:  # what tokenizers say of a string that UTF-8 cannot write
        raise InputError("The prompt is not text: it holds half a character.", "Write it in UTF-8.") from None


def render_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_generation_prompt: bool = True, **options: Any
) -> str:
    """Messages through the model's chat template."""
    if not getattr(_known(tokenizer), "chat_template", None):
        raise InputError("This model has no chat template.", "Give the prompt as text.")
    if not all(isinstance(each.get("role"), str) and "content" in each for each in messages):
        raise InputError("A chat message lacks its role or its content.", HOW)
    parts = [part for each in messages if isinstance(each["content"], list) for part in each["content"]]
    kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in parts]
    other = next((kind for kind in kinds if kind != "text"), None)
    if other is not None:
        raise InputError(f"A chat message has a part of type {other!r}, but only text can be read.", "Leave it out.")
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, tokenize=False, **options
            )
        )
    except Exception as error:  # the template is a program of the model's authors and raises what it likes
        raise InputError(f"The model's chat template refuses these messages: {error}.", HOW) from error


def _known(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise InputError("This engine has no tokenizer.", "Give token ids, or a tokenizer with the model.")
    return tokenizer


def _is_id(item: Any) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, bool | Tensor)
