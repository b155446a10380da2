"""A guide for tests: an answer that is known beforehand."""

from __future__ import annotations

import torch
from tests.engine.small import END, VOCAB


class Only:
    """A guide that lets one text through, then the end token."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.at = ids, 0

    def mask(self) -> torch.Tensor:
        token = self.ids[self.at] if self.at < len(self.ids) else END
        flags = torch.zeros(-(-VOCAB // 32) * 32, dtype=torch.int64)
        flags[token] = 1
        words = (flags.view(-1, 32) << torch.arange(32)).sum(-1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def accept(self, token: int) -> None:
        self.at += 1
