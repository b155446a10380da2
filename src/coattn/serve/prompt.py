"""Prompts and messages -> token ids. Runs outside the event loop: a long text takes a while."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from coattn.engine.llm import LLM
from coattn.engine.prompts import encode, encode_chat
from coattn.serve.errors import ApiError, invalid
from coattn.serve.schema.chat import ChatRequest, Function, Message, Tool, join_text
from coattn.serve.schema.completion import TokenizeRequest
from coattn.serve.steady import Steady
from coattn.serve.tools.family import knows_tools, tell

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What templates call that which a model has said to itself; those of models that do not reason read none of them."""
STEADY = Steady()


def from_text(llm: LLM, prompt: str | Sequence[int], param: str = "prompt", special: bool = True) -> list[int]:
    """Text or ids -> ids, checked against the model's vocabulary and the longest sequence."""
    if isinstance(prompt, str):
        _check_length(llm, len(prompt), param)
        if not special:
            prompt = [int(i) for i in llm.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]]
    ids = encode(prompt, llm.tokenizer, llm.vocabulary)
    return _fitting(llm, ids, param)


def from_messages(
    llm: LLM,
    body: ChatRequest | TokenizeRequest,
    tools: Sequence[Tool] | None,
    fits: bool = True,
    steady: Steady = STEADY,
) -> list[int]:
    """A chat through the model's own template -> ids.

    tools: those that the model is told of. fits: raises ApiError 400 for a chat that leaves no room for an answer.
    steady: what is done so that calls of one agent begin alike.
    """
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid("continue_final_message", "continue_final_message goes without add_generation_prompt.")
    plain = steady.messages([_plain(message, f"messages.{i}") for i, message in enumerate(body.messages or ())])
    _check_length(llm, sum(len(each["content"]) for each in plain), "messages")
    effort = getattr(body, "reasoning_effort", None)
    given = {**({} if effort is None else {"reasoning_effort": effort}), **(body.chat_template_kwargs or {})}
    own = taken(llm.tokenizer)
    wrong = next((name for name in given if name in own or not name.isidentifier()), None)
    if wrong is not None:
        raise invalid("chat_template_kwargs", f"chat_template_kwargs may not set {wrong[:80]!r}.")
    listed = steady.tools([tool.model_dump(exclude_none=True) for tool in tools or ()])
    if not knows_tools(llm.tokenizer):
        plain = tell(plain, listed)
    elif listed:
        given["tools"] = listed
    begins = body.add_generation_prompt is not False
    if body.continue_final_message:
        given["continue_final_message"], begins = True, False
    ids = encode_chat(plain, llm.tokenizer, add_generation_prompt=begins, **given)
    ids = encode(ids, llm.tokenizer, llm.vocabulary)
    return _fitting(llm, ids, "messages") if fits else ids


@lru_cache(maxsize=4)
def taken(tokenizer: Any) -> frozenset[str]:
    """Names that `apply_chat_template` takes for itself: a request may set what the template reads, no more."""
    return frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}


@lru_cache(maxsize=4)
def longest_token(tokenizer: Any) -> int:
    """Characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def _plain(message: Message, param: str) -> dict[str, Any]:
    """A message as templates know it."""
    if message.content is None and not message.tool_calls and message.role != "assistant":
        raise invalid(f"{param}.content", f"{param} has no content.")
    found = message.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
    if message.role == "developer":
        found["role"] = "system"
    found["content"] = "" if message.content is None else join_text(message.content, f"{param}.content")
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": each.id, "type": "function", "function": _called(each.function, param)}
            for each in message.tool_calls
        ]
    if message.reasoning_content and message.role == "assistant":
        # gpt-oss's template calls it `thinking`, and refuses it beside a call that has text
        both = message.tool_calls and found["content"]
        found |= dict.fromkeys(THOUGHTS[:2] if both else THOUGHTS, message.reasoning_content)
    return found


def _called(function: Function, param: str) -> dict[str, Any]:
    try:
        return {"name": function.name, "arguments": json.loads(function.arguments or "{}")}
    except (ValueError, RecursionError):
        raise invalid(f"{param}.tool_calls", f"{param}: the arguments of a tool call are not JSON.") from None


def _check_length(llm: LLM, characters: int, param: str) -> None:
    """Refuses a text that could not fit however it is cut into tokens, before any time goes into cutting it."""
    if llm.tokenizer is not None and characters > longest_token(llm.tokenizer) * llm.max_length:
        raise too_long(llm, param, f"The prompt has {characters:,} characters, more than these can hold.")


def _fitting(llm: LLM, ids: list[int], param: str) -> list[int]:
    if len(ids) >= llm.max_length:
        raise too_long(llm, param, f"The prompt has {len(ids):,}, and there is at least one more for the answer.")
    return ids


def too_long(llm: LLM, param: str, why: str) -> ApiError:
    """What a client is told whose prompt or answer is longer than sequences may be."""
    longest = f"This model's maximum context length is {llm.max_length:,} tokens, the server's --max-length."
    return invalid(param, f"{longest} {why}", "context_length_exceeded")
