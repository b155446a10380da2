"""Quest: the blocks whose digests promise the most (Tang et al., 2024, section 3.3; ScoutAttention, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from coattn.errors import ConfigError
from coattn.ops.score_digest import score_blocks
from coattn.part import check_count, check_number
from coattn.select.base import Select
from coattn.state import AttnState, Split
from coattn.store.base import Store
from coattn.store.digested.digest import BUDGET_FILE, HELP, SINKS, SLACK, Digested
from coattn.store.digested.residency import read_budgets
from coattn.types import Phase, Selection, Step


@dataclass
class DigestTop(Select):
    """Attends to the best blocks of each KV head, the newest always among them.

    See `score_blocks` for the score of a block. An append step, whose queries would each want their own list, attends
    to everything.
    """

    name = "digest_top"
    needs = frozenset({"digests", "all_tokens"})
    exact = False
    recordable = True
    help_text = {
        "budget": "tokens attended per KV head, counted in whole blocks, the newest ones included",
        "budget_file": BUDGET_FILE,
        "window_blocks": HELP["window_blocks"],
        "sink_blocks": SINKS,
        "slack": SLACK,
        "dense_layers": "first layers that attend to everything",
        "block": "tokens per block",
    }

    budget: int = 2048
    budget_file: str | None = None
    slack: float = 1.0
    dense_layers: int = 0
    window_blocks: int = 2
    sink_blocks: int = 0
    block: int = 32
    _store: Digested = field(init=False, repr=False, default=None)  # type: ignore[assignment]  # before `open`
    last: dict[int, tuple[Tensor, Tensor, Tensor, Step]] = field(init=False, repr=False, default_factory=dict)
    """By layer, between `pick` and `observe`: scores, places and counts of what was picked."""
    _foreseen: dict[int, tuple[Step, Selection]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_count("budget", self.budget, 1)
        check_count("window_blocks", self.window_blocks, 1)
        check_count("sink_blocks", self.sink_blocks, 0)
        check_number("slack", self.slack, 0, 1)
        check_count("dense_layers", self.dense_layers, 0)
        check_count("block", self.block, 1)
        self._budgets = None if self.budget_file is None else read_budgets(self.budget_file)
        always = self.window_blocks + self.sink_blocks
        least, smallest = (always + 1) * self.block, min(self._budgets or [self.budget])
        if smallest < least:
            name = "budget" if self._budgets is None else f"The smallest budget of {self.budget_file}"
            raise ConfigError(
                f"{name} is {smallest}, but {always} block(s) of {self.block} tokens are always "
                "attended, and one more must be picked.",
                f"Give {least} or more, or a smaller block.",
            )

    def open(self, store: Store) -> None:
        if self._budgets is not None and max(store.opening.layers) >= len(self._budgets):
            raise ConfigError(
                f"{self.budget_file} has budgets for {len(self._budgets)} layers, but the model has more.",
                "Give one for each layer.",
            )
        self._store = cast("Digested", store)

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"budget": tokens, "budget_file": None}

    def most(self) -> int:
        """The budget. A pool that is attended as a whole comes beside what is picked and is not in it."""
        return self._most() * (2 if self._store is not None and self._store.pick_once else 1)

    def _most(self) -> int:
        return self.budget if self._budgets is None else sum(self._budgets) // len(self._budgets)

    def _budget(self, layer: int) -> int:
        return self.budget if self._budgets is None else self._budgets[layer]

    def pick(self, layer: int, q: Tensor, store: Store, step: Step) -> Selection:
        return self._pick(layer, q, store, step, False)

    def foresee(self, layer: int, q: Tensor, store: Store, step: Step) -> Selection:
        return self._pick(layer, q, store, step, True)

    def _pick(self, layer: int, q: Tensor, store: Store, step: Step, ahead: bool) -> Selection:
        if step.phase is not Phase.DECODE or layer < self.dense_layers:
            return store.view(layer, step)
        inside, beside = self._store.always()
        count = self._budget(layer) // self.block - beside
        listed = self._store.candidates(layer, step, count)
        made = None if ahead else self._foreseen.pop(layer, None)
        if made is not None and made[0] is step and listed is not None:
            return made[1]
        self.last.pop(layer, None)
        if listed is None:
            return store.view(layer, step)
        if store.recording is not None:
            found = self._store.split(layer, q[:, 0], count, self.scale, self.slack, ahead)
            if found is not None:
                return found
        softcap = store.opening.layers[layer].softcap
        scores = score_blocks(
            q[:, 0],
            self._store.digests(layer),
            listed,
            self.block,
            self.scale,
            softcap,
            self.slack,
            self.sink_blocks,
        )
        chosen, counts = best_blocks(scores, listed.tokens, self.block, min(count, scores.shape[-1]), inside)
        self.last[layer] = (scores, chosen, counts, step)
        found = self._store.divide(layer, chosen, counts, step)
        if ahead and self._store.pick_once:
            self._foreseen[layer] = (step, found)
        return found

    def observe(self, layer: int, states: list[AttnState | Split], picked: Selection) -> None:
        if layer in self.last:
            self._store.learn(layer, *self.last.pop(layer))


def best_blocks(scores: Tensor, tokens: Tensor, block: int, count: int, recent: int) -> tuple[Tensor, Tensor]:
    """The `count` blocks of each sequence and KV head with the highest scores `[seqs, kv_heads, n]`, oldest first.

    -inf is the score of what a sequence does not have, and of a block without a digest.
    tokens: `[seqs, 1]` listed for each sequence, the last block perhaps partial. The newest `recent` blocks are always
    taken; a sequence of fewer blocks gets all of them. Returns the places, `[seqs, kv_heads, count]`, and how many of
    them count, `[seqs, kv_heads]`.
    """
    position = torch.arange(scores.shape[-1], device=scores.device)
    blocks = (-(-tokens // block))[:, :, None]
    wanted = scores.masked_fill((position >= blocks - recent) & (position < blocks), torch.inf)
    # in order of position, what a sequence does not have comes last, after what its count says
    chosen = wanted.topk(count, dim=-1).indices.sort(dim=-1).values
    return chosen, blocks[:, :, 0].clamp(max=count).expand(-1, scores.shape[1])
