"""`POST /tokenize`, `POST /detokenize`."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coattn.serve.answer.tokens import token_texts
from coattn.serve.context import asked
from coattn.serve.errors import invalid
from coattn.serve.prompt import from_messages, from_text
from coattn.serve.schema.completion import DetokenizeRequest, TokenizeRequest


async def tokenize(request: Request) -> Response:
    """A text or a chat -> its token ids."""
    here, body, _ = await asked(request, TokenizeRequest)
    llm = here.engine.ready()

    def work() -> dict[str, Any]:
        if body.messages is not None:
            ids = from_messages(llm, body, body.tools, steady=here.settings.steady)
        elif not body.prompt:
            ids = []
        else:
            ids = from_text(llm, body.prompt, special=body.add_special_tokens is not False)
        names = list(map(token_texts(llm.tokenizer).text, ids)) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": llm.max_length, "tokens": ids, "token_strs": names}

    return JSONResponse(await asyncio.get_running_loop().run_in_executor(here.threads, work))


async def detokenize(request: Request) -> Response:
    """Token ids -> text."""
    here, body, _ = await asked(request, DetokenizeRequest)
    llm = here.engine.ready()
    wrong = next((token for token in body.tokens if token >= llm.vocabulary), None)
    if wrong is not None:
        raise invalid("tokens", f"Token id {wrong} is not in the model's vocabulary of {llm.vocabulary:,}.")
    if llm.tokenizer is None:
        raise invalid("tokens", "This server has no tokenizer.")
    text = await asyncio.get_running_loop().run_in_executor(here.threads, llm.tokenizer.decode, body.tokens)
    return JSONResponse({"prompt": text})
