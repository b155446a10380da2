"""Content keys of texts: a block's key stands for all tokens up to its end.

A key is the SHA-256 of the key before it and the block's token ids; the first one is of the model, the row and the
tenant. So equal keys mean equal texts from the first token on.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Sequence

FORMAT = "coattn-prefix-1"


def digest(*fields: str | bytes | Sequence[int]) -> bytes:
    """SHA-256 over fields, each with its type and its length: no two lists of fields read the same."""
    made = hashlib.sha256()
    for each in fields:
        if isinstance(each, str):
            kind, data = b"s", each.encode()
        elif isinstance(each, bytes):
            kind, data = b"b", each
        else:
            kind, data = b"i", struct.pack(f"<{len(each)}q", *each)
        made.update(kind + struct.pack("<Q", len(data)) + data)
    return made.digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: Sequence[int], block: int) -> None:
    """Adds the keys of the full blocks of `tokens` that have none yet."""
    for b in range(len(keys), len(tokens) // block):
        keys.append(digest(keys[-1] if b else root, tokens[b * block : (b + 1) * block]))


def common_blocks(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Blocks that two chains of keys begin with."""
    shorter = range(min(len(one), len(other)))
    return bisect_left(shorter, True, key=lambda b: one[b] != other[b])


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts begin with."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])
