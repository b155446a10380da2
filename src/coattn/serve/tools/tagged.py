"""Arguments between tags, as Qwen3-Coder, GLM and MiniMax write them, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from coattn.serve.tools.family import Tags

Json = dict[str, Any]


class TaggedText:
    """The raw text of calls -> their names, and their arguments as the text of a JSON object, as it comes.

    A text is passed on while it is written; another value once it is whole.
    """

    def __init__(self, opened: str, tags: Tags, tools: Sequence[Json]) -> None:
        """opened: see `Family`. tools: as chats have them."""
        self.started = 0
        """Calls whose name is known."""
        self._types = {each["function"]["name"]: each["function"].get("parameters") or {} for each in tools}
        self._head = re.compile(opened)
        before, _, rest = tags.before.partition("KEY")
        self._key = re.compile(rf"\s*{re.escape(before)}(?P<key>.+?){_loose(rest)}", re.DOTALL)
        self._after = tags.after.rstrip()
        self._trims = tags.after.startswith("\n")
        self._left = ""
        self._schema: Json = {}
        self._inside = self._count = 0
        """Whether a call is open; its arguments so far."""
        self._value: bool | None = None
        """Whether the value that is open is text; None outside of one."""

    def feed(self, text: str) -> list[tuple[str | None, str]]:
        """`(name, "")` where a call begins, `(None, piece)` of its arguments."""
        self._left += text
        found: list[tuple[str | None, str]] = []
        while self._step(found):
            pass
        return found

    def _step(self, found: list[tuple[str | None, str]]) -> bool:
        """Takes the next piece off what is left; False where more must come first."""
        if not self._inside:
            match = self._head.search(self._left)
            if match is None:
                return False
            self._left = self._left[match.end() :]
            if match["name"] not in self._types:  # text that looks like a call
                return False
            self._inside, self._count = 1, 0
            self._schema = self._types[match["name"]].get("properties") or {}
            self.started += 1
            found += [(match["name"], ""), (None, "{")]
        elif self._value is None:
            match = self._key.match(self._left)
            end = re.match(r"\s*</", self._left)
            if (match is None and end is None) or (match is not None and match.end() == len(self._left)):
                return False  # a break of the line may belong to the tag
            if match is None:  # the call is over
                assert end is not None
                self._left, self._inside = self._left[end.end() :], 0
                found.append((None, "}"))
                return True
            self._left, key = self._left[match.end() :], match["key"]
            self._value = bool(is_text(self._schema.get(key, {})))
            found.append((None, f"{', ' if self._count else ''}{json.dumps(key, ensure_ascii=False)}: "))
            found += [(None, '"')] if self._value else []
            self._count += 1
        else:
            return self._go_on(found)
        return True

    def _go_on(self, found: list[tuple[str | None, str]]) -> bool:
        at = self._left.find(self._after.lstrip("\n"))
        ends = at >= 0
        if not ends:
            if not self._value:
                return False
            marks = (self._after, self._after.lstrip("\n"))
            at = len(self._left) - max(_overlap(self._left, mark) for mark in marks)
        value = self._left[:at]
        if ends:
            self._left = self._left[at + len(self._after.lstrip("\n")) :]
            value = value.removesuffix("\n") if self._trims else value
            found.append((None, json.dumps(value, ensure_ascii=False)[1:] if self._value else _json(value)))
            self._value = None
        elif value:
            self._left = self._left[at:]
            found.append((None, json.dumps(value, ensure_ascii=False)[1:-1]))
        return ends

    def close(self) -> list[tuple[str | None, str]]:
        """What is left when its region ends: the end of a call whose own tag was the region's."""
        found = [] if self._inside else self.feed("\n")
        if self._inside and self._value is None and not self._left.strip():
            self._inside = 0
            found.append((None, "}"))
        return found


def is_text(schema: Any) -> bool | None:
    """Whether a value of this schema is written as it is; None where that is open."""
    if not isinstance(schema, dict):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return all(isinstance(each, str) for each in values)
    return bool(schema["type"] == "string") if isinstance(schema.get("type"), str) else None


def _json(text: str) -> str:
    """A value whose kind is open: JSON if it is, or if Qwen3-Coder's template writes it so, else text."""
    shown = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        json.loads(shown)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return shown


def _loose(text: str) -> str:
    """An expression for tags between which there may be other white space."""
    parts: Iterable[str] = filter(None, re.split(r"\n", text))
    return r"\s*".join(map(re.escape, parts)) + (r"\n?" if text.endswith("\n") else "")


def _overlap(text: str, mark: str) -> int:
    """How much of the end of a text begins a mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
