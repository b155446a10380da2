"""What an answer may be when there are tools, as a grammar for llguidance.

Every call that comes names a function that there is and has arguments that meet its schema, whatever the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from coattn.serve.guide import FORM
from coattn.serve.tools.family import HARMONY, THINK, THOUGHT, Family, Tags
from coattn.serve.tools.tagged import is_text

Json = dict[str, Any]
ANY = r"/(?s:.*)/"
KEY = '/[^<>"=\\s]{1,64}/'
"""A name between tags."""
END = "<|end|>"
"""After a thought of gpt-oss."""
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
    arguments = [_arguments(lark, f"args{i}", family, schema) for i, (_, schema) in enumerate(tools)]
    if family is HARMONY:
        return _channels(
            lark, _choice(lark, [family.written(name) for name, _ in tools], arguments, ""), required, reply
        )
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


def channel_grammar(schema: Json, special: dict[str, int]) -> str:
    """JSON of a schema in gpt-oss's last channel."""
    return _channels(Lark(special), None, False, schema)


def _channels(lark: Lark, call: str | None, required: bool, reply: Json | None) -> str:
    """gpt-oss: thoughts and words before a call, then a call or the answer."""
    lark.rule("ANYTHING", ANY)

    def channel(name: str, body: str) -> str:
        return f"{lark.text(f'<|channel|>{name}<|message|>')} {body}"

    said = f"ANYTHING {lark.text(END)}"
    if END not in lark.special:
        lark.rule(f"said[suffix={json.dumps(END)}]", ANY)
        said = "said"
    said = f"{said} {lark.text('<|start|>assistant')}"
    first = f"({channel('analysis', said)} | {channel('commentary', said)}){{0,8}}"
    last = channel("final", "ANYTHING" if reply is None else lark.json("reply", reply))
    ends = [*([f"({call})"] if call else []), *([] if required else [last])]
    return lark.made(f"{first} ({' | '.join(ends)})")


def _arguments(lark: Lark, name: str, family: Family, schema: Json) -> str:
    """A rule for the arguments of a function, and the number before them."""
    made = lark.json(name, schema) if family.tags is None else _tagged(lark, name, family.tags, schema)
    if not family.numbered:
        return made
    return lark.rule(f"{name}_numbered", f"/[0-9]{{1,3}}/ {lark.text(family.numbered)} {made}")


def _tagged(lark: Lark, name: str, tags: Tags, schema: Json) -> str:
    """A rule for arguments that meet a schema, in its order; what a schema leaves open may be any text."""
    defs: Json = {each: schema[each] for each in ("$defs", "definitions") if each in schema}
    given = schema.get("properties")
    if not isinstance(given, dict) or (not given and schema.get("additionalProperties", True)):
        before, _, rest = tags.before.partition("KEY")
        one = f"{lark.text(before)} {KEY} {lark.text(rest)} {_value(lark, f'{name}_any', tags, {'type': 'string'}, {})}"
        return lark.rule(name, f"({one})*")
    parts = []
    for i, (key, each) in enumerate(given.items()):
        kind = each if isinstance(each, dict) else {}
        part = f"{lark.text(tags.before.replace('KEY', key))} {_value(lark, f'{name}_{i}', tags, kind, defs)}"
        parts.append(part if key in schema.get("required", ()) else f"({part})?")
    return lark.rule(name, " ".join(parts) or '""')


def _value(lark: Lark, name: str, tags: Tags, schema: Json, defs: Json) -> str:
    """A value and the tag after it."""
    after = lark.text(tags.after)
    text = is_text(schema)
    if text is False:
        return f"{lark.json(name, {**schema, **defs})} {after}"
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if text and isinstance(values, list):
        return f"({' | '.join(map(json.dumps, values))}) {after}"
    most = schema.get("maxLength", "")
    form = rf"(?s:.{{{schema.get('minLength', 0)},{most}}})"
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        start, end = "" if pattern.startswith("^") else "(?s:.*)", "" if pattern.endswith("$") else "(?s:.*)"
        form = f"{start}(?:{pattern.removeprefix('^').removesuffix('$')}){end}"
        form = re.sub(r"(?<!\\)/", r"\/", form)
    mark = tags.after.strip()
    if mark in lark.special:
        return f"{lark.rule(name.upper(), f'/{form}/')} {after}"
    lark.rule(f"{name}[suffix={json.dumps(tags.after)}]", f"/{form}/")
    return name


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
