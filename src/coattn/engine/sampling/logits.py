"""What changes scores before a token is chosen: penalties, biases, tokens that may not come yet, and guides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from coattn.engine.sampling.filters import penalise
from coattn.engine.sampling.params import SamplingParams

BITS = 32
"""Tokens per number of a guide's mask."""


class Guide(Protocol):
    """Decides which tokens may come next in one answer. Used by the thread that steps.

    Tokens that are fed before the answer do not reach it.
    """

    def mask(self) -> Tensor:
        """`[ceil(vocab / 32)]` int32 on the host: bit i of number j is set where token `32 j + i` may come."""

    def accept(self, token: int) -> None:
        """This token came. May start making the next mask while the next step runs."""


class Draws:
    """What sampling remembers of one request: its random numbers, and the tokens that penalties count."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: frozenset[int] = frozenset(),
        guide: Guide | None = None,
    ) -> None:
        self.params, self.prompt, self.ends, self.guide = params, prompt, ends, guide
        self.random = random.Random(params.seed)
        self.fed = len(params.feed)
        """Tokens that are still fed: what is drawn in their place counts for nothing."""
        self.drawn = 0
        """Tokens of the answer so far, where `min_new_tokens` asks."""
        self.seen: Tensor | None = None
        """`[vocab]` bool on the logits' device; a row of the batch it was last drawn in."""
        self.counts: Tensor | None = None
        """`[vocab]` float32: how often each token is in the answer; likewise a row."""

    @property
    def held(self) -> bool:
        """Whether the answer may not end yet."""
        return self.drawn < self.params.min_new_tokens


class Adjust:
    """The changes that a batch asks for. Each row's result depends on that row alone."""

    def __init__(self, who: Sequence[Draws], vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self._repeating = _which(who, lambda p: p.repetition_penalty != 1)
        self._charged = _which(who, lambda p: p.presence_penalty != 0 or p.frequency_penalty != 0)
        self._held = [
            (row, each, torch.tensor(sorted(t for t in each.ends if t < vocab), dtype=torch.long, device=device))
            for row, each in enumerate(who)
            if each.params.min_new_tokens
        ]
        self._guided = [(row, each, each.guide) for row, each in enumerate(who) if each.guide is not None]
        biases = [(row, token, value) for row, each in enumerate(who) for token, value in each.params.logit_bias]
        self._biases = biases and (
            self._index([row for row, _, _ in biases]),
            self._index([token for _, token, _ in biases]),
            torch.tensor([value for _, _, value in biases], dtype=torch.float32, device=device),
        )
        if self._repeating:
            self._seen_rows = self._index([row for row, _ in self._repeating])
            self._penalty = self._column([each.params.repetition_penalty for _, each in self._repeating])
            for _, each in self._repeating:
                if each.seen is None:
                    each.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
                    each.seen[torch.tensor(list(each.prompt), device=device)] = True
            self._seen = self._share("seen", [each for _, each in self._repeating])
        if self._charged:
            self._count_rows = self._index([row for row, _ in self._charged])
            self._presence = self._column([each.params.presence_penalty for _, each in self._charged])
            self._frequency = self._column([each.params.frequency_penalty for _, each in self._charged])
            for _, each in self._charged:
                if each.counts is None:
                    each.counts = torch.zeros(vocab, dtype=torch.float32, device=device)
            self._counts = self._share("counts", [each for _, each in self._charged])
        self.failed: dict[int, Exception] = {}
        """By row: why its guide could not say what may come in the last step."""
        self.idle = not (self._repeating or self._charged or self._held or self._guided or biases)
        """Whether scores stay as they are."""

    def __call__(self, logits: Tensor) -> Tensor:
        """logits `[n, vocab]` -> scores; the logits themselves where nothing is asked for, else a copy."""
        if self.idle:
            return logits
        scores = logits.clone()
        if self._repeating:
            scores[self._seen_rows] = penalise(logits[self._seen_rows], self._seen, self._penalty)
        if self._charged:
            scores[self._count_rows] -= self._frequency * self._counts + self._presence * (self._counts > 0)
        if self._biases:
            rows, tokens, values = self._biases
            scores.index_put_((rows, tokens), values, accumulate=True)
        for row, each, ends in self._held:
            if each.held:
                scores[row, ends] = -torch.inf
        self.failed.clear()
        asked = [(row, guide) for row, each, guide in self._guided if not each.fed]
        masks = {row: mask for row, guide in asked if (mask := self._mask(row, guide)) is not None}
        if masks:
            rows, bits = self._index(list(masks)), torch.stack(list(masks.values())).to(self.device)
            scores[rows] = scores[rows].masked_fill(~unpack(bits, self.vocab), -torch.inf)
        return scores

    def note(self, tokens: Tensor) -> None:
        """These tokens `[n]` were drawn."""
        if self._repeating:
            self._seen[torch.arange(len(self._seen), device=self.device), tokens[self._seen_rows]] = True
        if self._charged:
            own = [not each.fed for _, each in self._charged]
            counted = 1 if all(own) else torch.tensor(own, dtype=torch.float32, device=self.device)
            self._counts[torch.arange(len(self._counts), device=self.device), tokens[self._count_rows]] += counted

    def _mask(self, row: int, guide: Guide) -> Tensor | None:
        try:
            return guide.mask()
        except Exception as error:  # of this request alone: the others of the batch go on
            self.failed[row] = error
            return None

    def _share(self, name: str, who: Sequence[Draws]) -> Tensor:
        """One matrix for the batch; each request's row is a view of it, so it stays right when the batch changes."""
        shared = torch.stack([getattr(each, name) for each in who])
        for each, row in zip(who, shared, strict=True):
            setattr(each, name, row)
        return shared

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, device=self.device)

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)[:, None]


def unpack(bits: Tensor, vocab: int) -> Tensor:
    """bits `[n, ceil(vocab / 32)]` int32 -> `[n, vocab]` bool. Tokens beyond the bits are not allowed."""
    each = (bits[:, :, None] >> torch.arange(BITS, dtype=torch.int32, device=bits.device)) & 1
    flat = each.view(len(bits), -1).bool()
    if flat.shape[1] < vocab:
        flat = torch.nn.functional.pad(flat, (0, vocab - flat.shape[1]))
    return flat[:, :vocab]


def _which(who: Sequence[Draws], asks: Callable[[SamplingParams], bool]) -> list[tuple[int, Draws]]:
    return [(row, each) for row, each in enumerate(who) if asks(each.params)]
