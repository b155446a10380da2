"""Answers against OpenAI's published types, and Anthropic's where its package is installed, to the field.

The types are those of OpenAI's Python package, which is generated from the published OpenAPI document. They let unknown
fields pass; here only the ones that the docs name may.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

OURS = {"coattn", "prompt_progress", "token_ids", "reasoning_content"}
"""Fields beside OpenAI's, as docs/serving.md has them."""
WHOLE: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatCompletion, "/v1/completions": Completion}
WHOLE["/v1/responses"] = Response
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PARTS: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatCompletionChunk, "/v1/completions": Completion}


def check(path: str, status: int, text: str) -> None:
    """A response of a resource that OpenAI or Anthropic has, too."""
    if path.startswith("/v1/messages") and find_spec("anthropic"):
        _anthropic(path, status, text)
    if path not in WHOLE:
        return
    if status != 200:
        fits(ErrorObject, json.loads(text)["error"])
    elif not text.startswith("{"):
        for line in text.splitlines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if path == "/v1/responses":
                    event(chunk)
                    continue
                fits(ErrorObject, chunk["error"]) if "error" in chunk else fits(PARTS[path], _ended(path, chunk))
    else:
        fits(WHOLE[path], _ended(path, json.loads(text)))


def _anthropic(path: str, status: int, text: str) -> None:
    from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent

    kind = {"/v1/messages": Message, "/v1/messages/count_tokens": MessageTokensCount}[path]
    if text.startswith("{"):
        fits(kind if status == 200 else ErrorResponse, json.loads(text))
        return
    for line in text.splitlines():
        found = json.loads(line[6:]) if line.startswith("data: {") else {"type": "ping"}
        if found["type"] == "error":
            fits(ErrorResponse, found)
        elif found["type"] != "ping":  # which its package knows by the name of the event alone
            known(TypeAdapter(RawMessageStreamEvent).validate_json(json.dumps(found), strict=True))


def event(found: dict[str, Any]) -> None:
    """An event of a response is published, to the field."""
    if found["type"] == "response.function_call_arguments.done":
        assert found["name"], "OpenAI's document asks for it; not every version of its package knows it"
        found = {name: value for name, value in found.items() if name != "name"}
    known(EVENTS.validate_json(json.dumps(found), strict=True))


def fits(kind: type[BaseModel], given: Any) -> None:
    """Has every field that must be there, of its type, and none that is not published or ours."""
    known(kind.model_validate_json(json.dumps(given), strict=True))


def known(found: BaseModel) -> None:
    """It has no field that is not published or ours."""
    unknown = sorted(extras(found))
    assert not unknown, f"{type(found).__name__}: {unknown}"


def extras(value: Any) -> set[str]:
    if isinstance(value, BaseModel):
        own = {name for name in value.model_extra or {} if name not in OURS}
        for name in type(value).model_fields:
            own |= extras(getattr(value, name))
        return own
    if isinstance(value, list | tuple):
        return {name for each in value for name in extras(each)}
    return set()


def _ended(path: str, chunk: dict[str, Any]) -> dict[str, Any]:
    """The package has one type for whole completions and their chunks, and says that they always have ended, and that
    every token has a log-probability; the first of a prompt has none."""
    if path == "/v1/completions":
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            logprobs = choice["logprobs"]
            if logprobs is not None:
                logprobs["token_logprobs"] = [each or 0.0 for each in logprobs["token_logprobs"]]
                if logprobs["top_logprobs"] is not None:
                    logprobs["top_logprobs"] = [each or {} for each in logprobs["top_logprobs"]]
    return chunk
