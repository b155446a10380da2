"""Which replica has a request's KV: a hash of its session, or of how its prompt begins, decides where it goes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from coattn.engine.store.keys import digest

OPENING = 1024
"""Characters of a message, and characters or ids of a prompt, that are part of a key."""
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def affinity(path: str, raw: bytes, tenant: bytes) -> str:
    """The key of a request, the same for every turn of a conversation. tenant: who asks.

    "" where any replica will do: one that gets a body which cannot be parsed answers with the error.
    """
    try:
        body = from_json(raw) if path in (CHAT, TEXT, RESPONSES, MESSAGES) else None
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return ""
    begins = body.get("session_id")
    if begins is None:
        begins = _prompt(body.get("prompt")) if path == TEXT else _opening(body)
    return digest("replica", tenant, json.dumps([body.get("cache_salt"), begins])).hex()


def rank(key: str, names: Iterable[str]) -> list[str]:
    """Names of replicas, the one to ask first at the front.

    By rendezvous hashing: every router agrees, and when a replica comes or goes only its own keys move.
    """
    return sorted(names, key=lambda name: hashlib.sha256(f"{key}/{name}".encode()).digest())


def _opening(body: dict[str, Any]) -> list[str]:
    """How a conversation begins: up to the first message of a user, which tells it from others of the same app."""
    messages = body.get("messages", body.get("input"))
    found = [body.get("tools"), body.get("instructions")]
    for message in messages if isinstance(messages, list) else [messages]:
        found.append(message)
        if isinstance(message, dict) and message.get("role") == "user":
            break
    return [json.dumps(each, sort_keys=True)[:OPENING] for each in found]


def _prompt(prompt: Any) -> Any:
    """The beginning; of several prompts, that of the first one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt[:OPENING] if isinstance(prompt, str | list) else None
