"""Quest: the blocks whose digests promise the most (Tang et al., 2024, section 3.3; ScoutAttention, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from coattn.errors import ConfigError
from coattn.part import check_count, check_number
from coattn.select.base import Select
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
    _digests: Digested = field(init=False, repr=False)
    _beside: bool = field(init=False, repr=False, default=False)
    """Whether a pool as large as the budget is attended beside what is picked."""

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
        self._digests, self._beside = cast("Digested", store), "far" in store.provides

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"budget": tokens, "budget_file": None}

    def most(self) -> int:
        """The budget; where a pool of residents is attended as a whole, as many misses may come beside it."""
        budget = self.budget if self._budgets is None else max(self._budgets)
        return 2 * budget if self._beside else budget

    def _budget(self, layer: int) -> int:
        return self.budget if self._budgets is None else self._budgets[layer]

    def pick(self, layer: int, q: Tensor, store: Store, step: Step) -> Selection:
        if step.phase is not Phase.DECODE or layer < self.dense_layers:
            return store.view(layer, step)
        blocks = self._budget(layer) // self.block
        found = self._digests.pick_blocks(layer, q[:, 0], blocks, self.scale, self.slack)
        return store.view(layer, step) if found is None else found
