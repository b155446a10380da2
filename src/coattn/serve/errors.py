"""Errors in OpenAI's form, `{"error": {"message", "type", "param", "code"}}`; those of other APIs on their paths.

Only 5xx is worth a retry.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from coattn.errors import (
    BudgetError,
    BusyError,
    CoattnError,
    ConfigError,
    DeadlineError,
    InputError,
    SessionBusyError,
    TransferError,
    UnsupportedError,
)

RETRY = {"Retry-After": "1"}
TYPES = {429: "rate_limit_error", 503: "service_unavailable", 504: "timeout_error"}
"""What OpenAI's form calls errors of these statuses."""
MESSAGES, OLLAMA = "/v1/messages", "/api/"
"""Paths that begin so are Anthropic's, and Ollama's."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""What Anthropic's form calls errors of these statuses."""
BRANCHES = {"bool", "dict", "float", "int", "list", "model", "str"}
"""Words that pydantic puts into a path for the branch of a union it tried."""
KINDS = (
    (SessionBusyError, 409, "session_busy"),
    (BusyError, 503, "queue_full"),
    (TransferError, 503, "prefill_unavailable"),
    (DeadlineError, 504, "deadline_exceeded"),
    (BudgetError, 400, "memory_budget_exceeded"),
    ((ConfigError, InputError, UnsupportedError), 400, None),
    (CoattnError, 500, "engine_failure"),
)
"""What the engine's errors are over HTTP; the first that fits."""


class ApiError(Exception):
    """What a client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = RETRY if headers is None and status == 503 else headers or {}
        self.kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")

    def body(self, path: str = "") -> dict[str, Any]:
        """path: of the request, which decides the form."""
        if path.startswith(MESSAGES):
            kind = "invalid_request_error" if self.status < 500 else "api_error"
            shown = {"type": ANTHROPIC_TYPES.get(self.status, kind), "message": self.message}
            return {"type": "error", "error": shown}
        if path.startswith(OLLAMA):
            return {"error": self.message}
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        return JSONResponse(self.body(path), self.status, self.headers)


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A field that cannot be used."""
    return ApiError(400, message, param=param, code=code)


def explain(error: Exception) -> ApiError:
    """An error as a client should see it: of one that is neither ours nor the engine's, the log has more."""
    if isinstance(error, CoattnError):
        status, code = next((status, code) for kind, status, code in KINDS if isinstance(error, kind))
        return ApiError(status, f"{error.sentence} {error.hint}".strip(), code=code)
    said = "The server made a mistake. Its log says more."
    return error if isinstance(error, ApiError) else ApiError(500, said, code="internal_error")


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        said = f"The body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}."
        return ApiError(400, said, code="json_invalid")
    steps = [str(step) for step in first["loc"] if isinstance(step, int) or _is_field(step)]
    param = ".".join(steps) or None
    said = first["msg"].removeprefix("Value error, ").rstrip(".")
    return ApiError(400, f"{param or 'The body'}: {said}.", param=param, code=first["type"])


def _is_field(step: str) -> bool:
    return step.isidentifier() and step not in BRANCHES and not step[:1].isupper()
