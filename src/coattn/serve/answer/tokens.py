"""Single tokens as text and bytes, for log-probabilities and `/tokenize`."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LEAST = -9999.0
"""Stands for the log-probability of what cannot come: JSON has no infinity."""


@lru_cache(maxsize=1)
def byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {chr(byte) if byte in plain else chr(next(others)): byte for byte in range(256)}


class TokenTexts:
    """Bytes of tokens, remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special = {int(i) for i in getattr(tokenizer, "added_tokens_decoder", {})}
        self._by_bytes = _is_byte_level(tokenizer)
        self.raw = lru_cache(maxsize=1 << 16)(self._raw)

    def text(self, token: int) -> str:
        return self.raw(token).decode("utf-8", "replace")

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """`{token, logprob, bytes}`"""
        raw = self.raw(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LEAST), "bytes": list(raw)}

    def _raw(self, token: int) -> bytes:
        if self.tokenizer is None:
            return b""
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if token in self._special:
            return str(name).encode()
        if self._by_bytes:
            letters = byte_letters()
            if all(letter in letters for letter in name):
                return bytes(letters[letter] for letter in name)
        match = BYTE.fullmatch(name)
        if match is not None:
            return bytes([int(match[1], 16)])
        return str(name).replace("\u2581", " ").encode("utf-8", "replace")


token_texts = lru_cache(maxsize=2)(TokenTexts)
"""Of a tokenizer, remembered."""


def _is_byte_level(tokenizer: Any) -> bool:
    found = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if found is None:
        return False
    decoder = json.loads(found.__getstate__())
    kinds = [decoder, *decoder.get("decoders", [])]
    return any(each.get("type") == "ByteLevel" for each in kinds)
