"""An answer as it comes, taken apart: text, thoughts, calls. By Transformers' response parser.

What it yields are OpenAI's deltas; added up they are the message.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from coattn.serve.tools.family import JSON_HEAD, Family
from coattn.serve.tools.tagged import TaggedText

Json = dict[str, Any]
THOUGHTS = ("thinking", "reasoning", "reasoning_content")
LETTERS = string.ascii_letters + string.digits


class CallText:
    """The raw text of calls in JSON -> their names, and the text of their arguments as it comes."""

    def __init__(self, opened: str) -> None:
        """opened: see `Family`."""
        self._head = re.compile(f"(?:{opened or JSON_HEAD})(?={{)")
        self._escaped_name = not opened
        self.started = 0
        """Calls whose name is known."""
        self._left = ""
        self._inside = False
        self._depth, self._quoted, self._escaped = 0, False, False

    def feed(self, text: str) -> list[tuple[str | None, str]]:
        """`(name, "")` where a call begins, `(None, piece)` of its arguments."""
        self._left += text
        found: list[tuple[str | None, str]] = []
        while self._left:
            if not self._inside:
                match = self._head.search(self._left)
                if match is None:
                    break
                name = match["name"]
                found.append((json.loads(f'"{name}"') if self._escaped_name else name, ""))
                self.started += 1
                self._inside, self._left = True, self._left[match.end() :]
            else:
                end = self._end()
                piece = self._left if end is None else self._left[:end]
                found.append((None, piece))
                self._left = "" if end is None else self._left[end:].lstrip().removeprefix("}")
                self._inside = end is None
        return found

    def close(self) -> list[tuple[str | None, str]]:
        """What is left at the end: nothing."""
        return []

    def _end(self) -> int | None:
        """Where the object ends that is being read."""
        for i, letter in enumerate(self._left):
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = not self._escaped and letter == "\\"
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


class PlainText:
    """An answer that is text as it comes."""

    calls = 0

    def feed(self, text: str, last: bool = False) -> Json:
        return {"content": text} if text else {}


class ResponseParser:
    """One answer with calls or thoughts in it."""

    def __init__(self, parser: Any, family: Family | None, tools: Sequence[Json] = ()) -> None:
        """tools: those that may be called; values between tags are read by their schemas."""
        self._parser, self._family, self._tools = parser, family, tools
        self.calls = 0
        self._text = self._new()
        self._raw = ""
        """Text of the last region of calls."""
        self._blank = ""
        """White space that is shown only if something follows it."""
        self._spoke = False
        """Whether the answer has had text."""
        self._delta: Json = {}
        self._take(parser.initial_events)
        self._delta.clear()  # the prompt's own part was not written by the model

    def feed(self, text: str, last: bool = False) -> Json:
        """What came -> a delta, which may be empty. last: the answer ends here."""
        try:
            if self._parser is None:
                self._say(text)
            else:
                self._take(self._parser.feed(text))
                self._take(self._parser.finalize()[1] if last else [])
        except ValueError:  # of a call that is no JSON, by a template of the model's own: what follows is text
            self._parser = None
        found, self._delta = self._delta, {}
        return found

    def _take(self, events: list[Json]) -> None:
        for event in events:
            field, kind = event["field"], event["type"]
            if field == "tool_calls":
                self._call(kind, event)
            elif kind == "region_chunk" and field in THOUGHTS:
                self._add("reasoning_content", event["text"])
            elif kind == "region_chunk" and field == "content":
                self._say(event["text"])

    def _new(self) -> CallText | TaggedText:
        """For the next region of calls."""
        if self._family is None or self._family.tags is None:
            return CallText("" if self._family is None else self._family.opened)
        return TaggedText(self._family.opened, self._family.tags, self._tools)

    def _call(self, kind: str, event: Json) -> None:
        if kind == "region_open":
            self._text, self._raw, self._blank = self._new(), "", ""
        elif kind == "region_chunk":
            self._raw += event["text"]
            self._show(self._text.feed(event["text"]))
        else:
            self._show(self._text.close())
            value = event["value"] if isinstance(event["value"], list) else [event["value"]]
            for each in value[self._text.started :]:
                self._whole(each)

    def _show(self, found: list[tuple[str | None, str]]) -> None:
        for name, piece in found:
            self._begin(name) if name is not None else self._go_on(piece)

    def _whole(self, call: Any) -> None:
        """A call that was not seen to come."""
        function = call.get("function", call) if isinstance(call, dict) else {}
        given = function.get("arguments", function.get("parameters", {}))
        if isinstance(function.get("name"), str) and isinstance(given, dict):
            self._begin(function["name"])
            self._go_on(json.dumps(given, ensure_ascii=False))
        elif not self._text.started:  # it looked like one, but is none
            self._say(("" if self._family is None else self._family.marker) + self._raw)

    def _begin(self, name: str) -> None:
        length = None if self._family is None else self._family.id_length
        word = "".join(secrets.choice(LETTERS) for _ in range(length or 24))
        given = {"index": self.calls, "id": word if length else f"call_{word}", "type": "function"}
        if self._family is not None and self._family.numbered:
            given["id"] = f"functions.{name}:{self.calls}"
        self.calls += 1
        self._delta.setdefault("tool_calls", []).append({**given, "function": {"name": name, "arguments": ""}})

    def _go_on(self, piece: str) -> None:
        listed = self._delta.setdefault("tool_calls", [])
        if listed and listed[-1]["index"] == self.calls - 1:
            listed[-1]["function"]["arguments"] += piece
        else:
            listed.append({"index": self.calls - 1, "function": {"arguments": piece}})

    def _say(self, text: str) -> None:
        text = self._blank + text
        if not self._spoke or self.calls:  # what lies between a thought or a call and the text is no part of it
            text = text.lstrip()
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._spoke = True
            self._add("content", shown)

    def _add(self, name: str, text: str) -> None:
        self._delta[name] = self._delta.get(name, "") + text


Reader = ResponseParser | PlainText
"""`feed` takes what came and gives a delta."""


def message(reading: Reader, text: str) -> Json:
    """A whole answer -> content, tool_calls, reasoning_content, as far as it has them."""
    found = reading.feed(text, last=True)
    for call in found.get("tool_calls", ()):
        del call["index"]  # which only deltas have
    return {"content": None if reading.calls else "", **found}
