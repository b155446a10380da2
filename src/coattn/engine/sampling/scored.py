"""What a model says of the tokens of a prompt, while it reads them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coattn.engine.request import Request, TokenLogprobs
from coattn.errors import ConfigError

ROWS = 64
"""Positions whose log-probabilities are in memory at once."""


def unshared(prompt: Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a request whose prompt is scored: it is read whole, so nothing of it may be stored already.

    fields: the others. Raises ConfigError where something is.
    """
    if fields.get("given") is not None or fields.get("session") is not None:
        said = "prompt_logprobs needs a prompt that is read here and now, not a session's or one that was read before."
        raise ConfigError(said, "Leave prompt_logprobs out, or ask without a session.")
    return {"salt": secrets.token_bytes(16), "scored": [None] * len(prompt)}


def scoring(request: Request) -> Callable[[int, Tensor], None] | None:
    """What hears the logits of the next tokens of a prompt; None where nobody asks. A step that failed is heard
    again."""
    scored, stored = request.scored, request.stored
    if scored is None:
        return None
    count = request.params.prompt_logprobs or 0

    def hear(start: int, logits: Tensor) -> None:
        for at in range(0, len(logits), ROWS):
            some, first = logits[at : at + ROWS], stored + start + at + 1  # each position speaks of the token after it
            tokens = torch.tensor(request.prompt[first : first + len(some)], device=some.device)
            if not len(tokens):
                return
            logprobs = some[: len(tokens)].log_softmax(-1)
            best, ids = logprobs.topk(count, -1)
            own = logprobs.gather(-1, tokens[:, None])
            rows = torch.cat([own.double(), ids.double(), best.double()], -1).tolist()
            for i, (value, *rest) in enumerate(rows):
                top = zip(map(int, rest[:count]), rest[count:], strict=True)
                scored[first + i] = TokenLogprobs(value, tuple(top))

    return hear
