"""What an answer may be when there are tools, as a grammar for llguidance.

Every call that comes names a function that there is and has arguments that meet its schema, whatever the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from coattn.serve.guide import FORM
from coattn.serve.tools.family import THINK, THOUGHT, Family

Json = dict[str, Any]
ANY = r"/(?s:.*)/"
SOLID = r"/(\S(?s:.*))?/"
"""Text that does not begin with white space."""


class Lark:
    """A grammar that grows. special: tokens that are more than their text, by name."""

    def __init__(self, special: dict[str, int]) -> None:
        self.special = special
        self._lines: list[str] = []
        self._parts = re.compile(f"({'|'.join(sorted(map(re.escape, special), key=len, reverse=True)) or '(?!)'})")

    def text(self, given: str) -> str:
        """Words of the grammar for this text."""
        parts = filter(None, self._parts.split(given))
        return " ".join(f"<[{self.special[each]}]>" if each in self.special else json.dumps(each) for each in parts)

    def rule(self, name: str, body: str) -> str:
        self._lines.append(f"{name}: {body}")
        return name

    def json(self, name: str, schema: Json) -> str:
        """A rule for JSON of this schema."""
        return self.rule(name, "%json " + json.dumps({**schema, "x-guidance": FORM}))

    def made(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines]) + "\n"


def tools_grammar(
    family: Family,
    tools: Sequence[tuple[str, Json]],
    special: dict[str, int],
    *,
    required: bool,
    parallel: bool,
    reply: Json | None = None,
    thinks: bool = False,
    thinking: bool = False,
) -> str:
    """tools: names and schemas of arguments; reply: the schema of an answer that is no call, where it must have one.

    thinks: the model may think first; thinking: the prompt ends inside a thought.
    """
    lark = Lark(special)
    arguments = [lark.json(f"args{i}", schema) for i, (_, schema) in enumerate(tools)]
    names = [name for name, _ in tools]
    more = family.most - 1 if parallel else 0

    def calls(first: str, heads: Sequence[str]) -> str:
        """first: what comes before all calls; heads: what the first of them begins with, by function."""
        one = _choice(lark, heads, arguments, family.tail)
        follow = ""
        if more:
            next_one = _choice(lark, [family.written(name) for name in names], arguments, family.tail)
            follow = f"({lark.text(family.between)} ({next_one})){{0,{more}}}"
        return " ".join(part for part in (lark.text(first), f"({one})", follow, lark.text(family.last)) if part)

    whole = calls(family.first, [family.written(name) for name in names])
    if required:
        start = whole
    elif reply is not None:
        start = f"({whole}) | {lark.json('reply', reply)}"
    else:
        lark.rule("TEXT", _text(lark, family, thinks))
        if not family.anywhere:
            start = f"({whole}) | TEXT"
        elif family.marker in lark.special:
            start = f"TEXT ({whole})?"
        else:
            # the text before a call ends with the marker: one word, so that the lexer need not choose between two
            lark.rule(f"before[suffix={json.dumps(family.marker)}]", SOLID if thinks else ANY)
            heads = [family.written(name) for name in names]
            rest = [head if family.first else head.removeprefix(family.marker) for head in heads]
            start = f"TEXT | before {calls(family.first.removeprefix(family.marker), rest)}"
    return lark.made(_after_thought(lark, start, thinks, thinking))


def reply_grammar(schema: Json, special: dict[str, int], *, thinking: bool) -> str:
    """JSON of a schema, after a thought."""
    lark = Lark(special)
    return lark.made(_after_thought(lark, lark.json("reply", schema), True, thinking))


def _choice(lark: Lark, heads: Sequence[str], arguments: Sequence[str], tail: str) -> str:
    each = zip(heads, arguments, strict=True)
    return " | ".join(f"{lark.text(head)} {schema} {lark.text(tail)}".rstrip() for head, schema in each)


def _text(lark: Lark, family: Family, thinks: bool) -> str:
    """Text that is neither a call nor a thought."""
    marker = re.escape(family.marker).replace("/", r"\/")
    inner = f"(?s:.*){marker}(?s:.*)" if family.anywhere else rf"\s*{marker}(?s:.*)"
    # after a thought, white space belongs to neither the text nor the call
    text = f"{SOLID if thinks else ANY} & ~/{inner}/"
    return text if not thinks or THINK in lark.special else f"{text} & ~/{THINK}(?s:.*)/"


def _after_thought(lark: Lark, start: str, thinks: bool, thinking: bool) -> str:
    if not thinks:
        return start
    if THOUGHT in lark.special:
        lark.rule("THOUGHT", ANY)
        thought = f"THOUGHT {lark.text(THOUGHT)}"
    else:
        lark.rule(f"thought[suffix={json.dumps(THOUGHT)}]", ANY)
        thought = "thought"
    lark.rule("body", start)
    gap = r"/\n{0,2}/"
    if thinking:
        return f"{thought} {gap} body"
    return f"{lark.text(THINK)} {thought} {gap} body | body"
