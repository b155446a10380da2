"""Fields that clients of others send: forms of answers are taken, and what cannot be done here is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coattn.serve.errors import invalid
from coattn.serve.schema.base import Body, ResponseFormat, Sampling

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FORMS = {f"guided_{kind}": kind for kind in KINDS[:4]}
FORMS |= {"json_schema": "json", "grammar": "grammar", "regex": "regex", "ebnf": "grammar"}
"""Fields that hold a form, and its kind."""
REFUSED = {
    "functions": "That is an old name. Use tools.",
    "function_call": "That is an old name. Use tool_choice.",
    "web_search_options": "This server searches nothing.",
    "documents": "Documents are not read here; write them into a message.",
    "structural_tag": "Forms inside of tags are not known here; response_format takes a grammar.",
    "guided_whitespace_pattern": "JSON comes on one line here.",
    "audio": "Answers are text here.",
    "chat_template": "A template is not taken from a request; the model's own is used.",
    "suffix": "Text cannot be inserted before a suffix here.",
    "prompt_logprobs": "POST /v1/completions gives them with echo: true and logprobs.",
    "truncate_prompt_tokens": "Prompts are not cut here: send the part that is to be read.",
    "use_beam_search": "There is no beam search here.",
    "bad_words": "Words cannot be forbidden here; logit_bias forbids tokens.",
    "allowed_token_ids": "Tokens cannot be allowed one by one here; response_format takes a regex or a grammar.",
    "logits_processors": "No code is taken from a request.",
    "include_stop_str_in_output": "Stop strings are not part of answers here.",
}
"""Fields that would change the text, and why they cannot."""
FIELDS = (*FORMS, "structured_outputs", *REFUSED)


def refuse(body: Body, reasons: Mapping[str, str]) -> None:
    """Raises ApiError 400 with its reason for a field that is set."""
    for name, why in reasons.items():
        value = getattr(body, name, None)
        if _is_set(value) and value != "":
            raise invalid(name, f"{why} Leave {name} out.")


def take(body: Sampling) -> None:
    """Sets `response_format` from a form under another name. Raises ApiError 400 for what cannot be done here."""
    refuse(body, REFUSED)
    extra = {name: value for name, value in (body.model_extra or {}).items() if _is_set(value)}
    given = [(name, kind, extra[name]) for name, kind in FORMS.items() if name in extra]
    structured = extra.get("structured_outputs", {})
    if not isinstance(structured, Mapping):
        raise invalid("structured_outputs", "structured_outputs is an object.")
    if _is_set(structured.get("whitespace_pattern")):
        raise invalid(
            "structured_outputs", "JSON comes on one line: leave whitespace_pattern out of structured_outputs."
        )
    given += [("structured_outputs", kind, structured[kind]) for kind in KINDS if _is_set(structured.get(kind))]
    if not given:
        return
    name, kind, value = given[0]
    if len(given) > 1 or body.response_format is not None:
        raise invalid(name, f"{name} is not the only form of the answer. Give one.")
    try:
        body.response_format = ResponseFormat.model_validate(_form(kind, value))
    except (ValueError, TypeError, RecursionError):
        raise invalid(name, f"{name} is not a form that can be used here.") from None


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != []


def _form(kind: str, value: Any) -> dict[str, Any]:
    """As `response_format` has it. Raises ValueError or TypeError."""
    if kind == "json":
        schema = json.loads(value) if isinstance(value, str) else value
        return {"type": "json_schema", "json_schema": {"schema": schema}}
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
            raise ValueError
        return {"type": "grammar", "grammar": f"start: {' | '.join(map(json.dumps, value))}\n"}
    return {"type": kind, kind: value}
