"""Fields that the requests for text share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST = (1 << 31) - 1
Json = dict[str, Any]


class Body(BaseModel):
    """Types are taken at their word (no `"1"` for 1); unknown fields are kept apart and ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


Count = Annotated[int, Field(ge=1, le=MOST)]
TokenId = Annotated[int, Field(ge=0, le=MOST)]


class JsonSchema(Body):
    """A schema that the answer must meet."""

    name: str | None = None
    description: str | None = None
    schema_: Json | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None


class StreamOptions(Body):
    """How a stream tells of tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Posted(Body):
    """What a client posts. None stands for the default everywhere."""

    model: str | None = None


class Shared(Posted):
    """Fields of every request for text."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | list[str] | None = None
    priority: Annotated[int, Field(ge=-MOST, le=MOST)] | None = None
    """A lower number is served first."""
    timeout_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    """A conversation: what was stored in its earlier turns is not read again."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Of the same API key, only requests with the same salt share what is stored."""
    user: str | None = None


class Sampling(Shared):
    """Fields of chats and completions."""

    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    response_format: ResponseFormat | None = None
    return_progress: bool | None = None
    """Streams tell how much of the prompt has been read."""
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
