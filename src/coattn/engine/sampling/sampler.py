"""Logits to tokens, for requests with different settings in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coattn.engine.request import TokenLogprobs
from coattn.engine.sampling.filters import drop_unlikely, keep_top, pick
from coattn.engine.sampling.logits import Adjust, Draws

COLDEST = 1e-5
"""Below this a temperature means greedy."""


class Drawn(NamedTuple):
    """A token; finite is False where the model's logits were not numbers, and then the token means nothing."""

    token: int
    finite: bool
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None
    """Why there is no token, where the request's guide failed."""


class Sampler:
    """Draws one token per row. A batch of greedy requests without log-probabilities costs one reduction and one copy.

    Tensors that only depend on who is in the batch are kept until somebody joins or leaves.
    """

    def __init__(self, apart: bool = False) -> None:
        """apart: each row is worked on by itself, so that it cannot depend on how many there are."""
        self._batch: _Batch | None = None
        self._apart, self._single = apart, list[_Batch]()

    @torch.no_grad()
    def draw(self, logits: Tensor, who: Sequence[Draws], best: Sequence[int] | None = None) -> list[Drawn]:
        """logits `[n, vocab]`, any device and float dtype -> one token each. One copy to the host.

        best: the most likely tokens, where they are known already; negative where the logits are not finite.
        """
        batch = self._batch
        if batch is None or batch.who != tuple(who):
            batch, self._single = _Batch(logits, who), []
            self._batch = batch
        if best is not None and batch.plain:
            return [Drawn(token, token >= 0) for token in best]
        if not self._apart or len(who) == 1:
            return batch.read(batch.columns(logits.float()).tolist())
        self._single = self._single or [_Batch(logits, [each]) for each in who]
        # rows in memory of their own: how a sum begins may depend on where it lies
        rows = [each.columns(logits[i : i + 1].clone().float()) for i, each in enumerate(self._single)]
        lists = [row.tolist() for row in rows]  # after all of them are under way
        return [drawn for each, row in zip(self._single, lists, strict=True) for drawn in each.read(row)]

    def forget(self) -> None:
        """Lets go of the tensors of the last batch."""
        self._batch, self._single = None, []


class _Batch:
    """The settings of a batch as columns `[n, 1]`, and which rows need which work."""

    def __init__(self, logits: Tensor, who: Sequence[Draws]) -> None:
        self.who = tuple(who)
        self.vocab, self.device = logits.shape[-1], logits.device
        params = [each.params for each in who]
        self.adjust = Adjust(who, self.vocab, self.device)
        self.sampled = self._rows([not each.greedy for each in params])
        self.top = max((each.logprobs for each in params if each.logprobs is not None), default=-1)
        self.top = min(self.top, self.vocab)
        self.plain = self.adjust.idle and self.sampled is None and self.top < 0
        """Whether the most likely tokens are all that is asked for."""
        if self.sampled is not None:
            chosen = [each for each in params if not each.greedy]
            self.drawing = [each for each in who if not each.params.greedy]
            self.temperature = self._column([each.temperature or 0.0 for each in chosen]).clamp(min=COLDEST)
            top_k, top_p = [float(each.top_k or 0) for each in chosen], [each.top_p or 1.0 for each in chosen]
            self.ordered = self._rows([k > 0 or p < 1 for k, p in zip(top_k, top_p, strict=True)])
            self.min_p = self._column([each.min_p for each in chosen]) if any(p.min_p for p in chosen) else None
            if self.ordered is not None:
                self.top_k = self._column(top_k, self.ordered).long()
                self.top_p = self._column(top_p, self.ordered)

    def columns(self, logits: Tensor) -> Tensor:
        """`[n, 2 or more]` float64: token, largest logit; then, where asked for, log-probabilities."""
        scores = self.adjust(logits)
        largest, tokens = scores.max(-1)
        if self.sampled is not None:
            tokens[self.sampled] = self._sample(scores[self.sampled])
        self.adjust.note(tokens)
        found = [tokens.double()[:, None], largest.double()[:, None]]
        if self.top >= 0:
            logprobs = logits.log_softmax(-1)
            best, ids = logprobs.topk(self.top, -1)
            found += [logprobs.gather(-1, tokens[:, None]).double(), ids.double(), best.double()]
        return torch.cat(found, -1)

    def read(self, rows: list[list[float]]) -> list[Drawn]:
        """The columns, on the host, as what they mean."""
        drawn = []
        for row, (each, (token, largest, *rest)) in enumerate(zip(self.who, rows, strict=True)):
            each.drawn += not each.fed
            logprobs = None
            if each.params.logprobs is not None:
                count = min(each.params.logprobs, self.vocab)
                ids, best = rest[1 : 1 + count], rest[1 + self.top : 1 + self.top + count]
                logprobs = TokenLogprobs(rest[0], tuple(zip(map(int, ids), best, strict=True)))
            drawn.append(Drawn(int(token), abs(largest) < float("inf"), logprobs, self.adjust.failed.get(row)))
        return drawn

    def _sample(self, scores: Tensor) -> Tensor:
        """scores `[m, vocab]`, which are used up -> `[m]` tokens."""
        scores.sub_(scores.amax(-1, True)).div_(self.temperature)  # the largest is 0: nothing overflows
        if self.ordered is not None:
            scores[self.ordered] = keep_top(scores[self.ordered], self.top_k, self.top_p)
        shares = scores.softmax(-1)
        if self.min_p is not None:
            shares = drop_unlikely(shares, self.min_p)
        drawn = [0.0 if each.fed else each.random.random() for each in self.drawing]
        numbers = torch.tensor(drawn, dtype=torch.float64)
        return pick(shares, numbers.to(self.device))

    def _rows(self, which: list[bool]) -> Tensor | None:
        if not any(which):
            return None
        return torch.tensor([i for i, yes in enumerate(which) if yes], device=self.device)

    def _column(self, values: list[float], rows: Tensor | None = None) -> Tensor:
        column = torch.tensor(values, dtype=torch.float32, device=self.device)[:, None]
        return column if rows is None else column[rows]
