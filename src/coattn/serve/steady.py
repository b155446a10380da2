"""Prompts of one agent that begin alike from call to call: what changes with every call goes out of the way.

KV of a token depends on every token before it, so nothing after a changed line can be used again exactly. Here the line
itself is dropped or moved behind what stays, before the prompt is cut into tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
BILLING = re.compile(r"x-anthropic-billing-header:")
"""How the line begins in which Claude Code says whom a call is counted for. No model is meant to read it."""
SYSTEM = ("system", "developer")
SETS = ("required",)
"""Lists of a JSON schema whose order means nothing."""


@dataclass(frozen=True)
class Steady:
    """What is done to the messages and tools of every chat."""

    billing: bool = True
    """Lines of `BILLING` are dropped from system messages."""
    moved: tuple[re.Pattern[str], ...] = ()
    """Lines of system messages that begin like one of these go to the end of the last message, if it is a user's or a
    tool's."""
    sort_tools: bool = False
    """Tools are sorted by name, and the keys of their schemas: in another order they are the same prompt."""

    def messages(self, given: Sequence[Json]) -> list[Json]:
        """Messages as templates know them, with `role` and text as `content`; those given stay as they are."""
        kept: list[Json] = []
        late: list[str] = []
        moves = bool(given) and given[-1]["role"] in ("user", "tool")
        for message in given:
            if message["role"] not in SYSTEM:
                kept.append(message)
                continue
            lines = message["content"].splitlines(keepends=True)
            left = [line for line in lines if not (self.billing and BILLING.match(line))]
            if moves:
                late += [line.rstrip("\r\n") for line in left if self._is_moved(line)]
                left = [line for line in left if not self._is_moved(line)]
            text = message["content"] if len(left) == len(lines) else "".join(left)
            if text.strip() or text == message["content"]:
                kept.append({**message, "content": text})
        if late:
            last = kept[-1]
            kept[-1] = {**last, "content": "\n\n".join(filter(None, (last["content"], "\n".join(late))))}
        return kept

    def tools(self, given: Sequence[Json]) -> list[Json]:
        """Tools as templates know them, in canonical form if that is wanted."""
        if not self.sort_tools:
            return list(given)
        return sorted(map(_sorted, given), key=lambda tool: str(tool["function"]["name"]))

    def _is_moved(self, line: str) -> bool:
        return any(pattern.match(line) for pattern in self.moved)


def _sorted(value: Any, name: str = "") -> Any:
    """JSON with the keys of objects in order, and the lists that are sets."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key], key) for key in sorted(value)}
    if isinstance(value, list):
        return sorted(value, key=str) if name in SETS else [_sorted(each) for each in value]
    return value
