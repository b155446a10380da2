"""Tools for models whose chat template knows none: they are told in words, and calls are part of the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from coattn.serve.tools.family import HERMES

Message = dict[str, Any]
WORDS = """You can call these functions, one JSON object on each line:
{tools}
To call one, write its name and its arguments as JSON, like this:
<tool_call>
{{"name": "function", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def tell(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Messages with nothing in them but roles and text, and the tools in the first."""
    found = [_plain(message) for message in messages]
    if not tools:
        return found
    words = WORDS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{words}".strip()}, *found[1:]]
    return [{"role": "system", "content": words}, *found]


def _plain(message: Message) -> Message:
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        HERMES.written(each["function"]["name"])
        + json.dumps(each["function"]["arguments"], ensure_ascii=False)
        + HERMES.tail
        for each in message.get("tool_calls", ())
    ]
    text = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    return {"role": message["role"], "content": text}
