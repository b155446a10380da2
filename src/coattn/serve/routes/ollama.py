"""Ollama's API: `/api/chat`, `/api/generate`, `/api/tags`, `/api/show` and `/api/version`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coattn._version import __version__
from coattn.engine.llm import LLM
from coattn.serve import ask
from coattn.serve.answer.ollama import OllamaAnswer
from coattn.serve.body import read
from coattn.serve.call import Order
from coattn.serve.context import Context, context
from coattn.serve.errors import invalid
from coattn.serve.respond import respond
from coattn.serve.routes.text import preparing
from coattn.serve.schema.base import Posted
from coattn.serve.schema.ollama import OllamaChat, as_chat
from coattn.serve.tools.family import knows_tools, reasons, template_text

M = TypeVar("M", bound=Posted)
JSON_LINES = "application/x-ndjson"


async def chat(request: Request) -> Response:
    """Goes on with a chat, as Ollama has it."""
    return await _answer(request, "messages")


async def generate(request: Request) -> Response:
    """Answers a prompt, as Ollama has it."""
    return await _answer(request, "prompt")


async def tags(request: Request) -> Response:
    """The models that are here, as Ollama lists them."""
    here = context(request)
    names = here.names if here.engine.llm is not None else ()
    at = datetime.fromtimestamp(here.started, UTC).isoformat().replace("+00:00", "Z")
    same = {"modified_at": at, "size": 0, "digest": "", "details": _details(here)}
    return JSONResponse({"models": [{"name": name, "model": name, **same} for name in names]})


async def show(request: Request) -> Response:
    """What a model is, as Ollama shows it."""
    here, *_ = await _asked(request, Posted)
    llm, kind = here.engine.ready(), _details(here)["family"]
    can = [("tools", knows_tools(llm.tokenizer)), ("thinking", reasons(llm.tokenizer))]
    return JSONResponse(
        {
            "template": template_text(llm.tokenizer),
            "details": _details(here),
            "model_info": {"general.architecture": kind, f"{kind}.context_length": llm.max_length},
            "capabilities": ["completion", *(name for name, yes in can if yes)],
        }
    )


async def version(_: Request) -> Response:
    """The server's version."""
    return JSONResponse({"version": __version__})


async def _asked(request: Request, kind: type[M]) -> tuple[Context, M, str]:
    """As `context.asked`; Ollama's clients may add `:latest` to a name."""
    here = context(request)
    body = await read(request, kind, here.settings)
    name = body.model if body.model in here.names else (body.model or "").removesuffix(":latest")
    return here, body, here.model(name)


async def _answer(request: Request, field: str) -> Response:
    here, body, name = await _asked(request, OllamaChat)
    if getattr(body, field) is None:
        raise invalid(field, f"{field} is missing.")
    asked = as_chat(body)
    ask.check_fields(asked, here.settings, 1)

    def build(llm: LLM, order: Order) -> OllamaAnswer:
        return OllamaAnswer(llm, name, order, field == "messages")

    make = preparing(asked, here, 1, None, cuts=True)
    return await respond(request, here, asked, 1, make, build, JSON_LINES)


def _details(here: Context) -> dict[str, Any]:
    llm = here.engine.llm
    kind = "" if llm is None else llm.model.config.model_type
    size = "" if llm is None else f"{sum(each.numel() for each in llm.model.parameters()) / 1e9:.1f}B"
    same = {"parent_model": "", "format": "", "parameter_size": size, "quantization_level": ""}
    return {**same, "family": kind, "families": [kind]}
