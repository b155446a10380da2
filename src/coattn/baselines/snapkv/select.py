"""SnapKV's rule: of a prompt stay the positions that its last queries weigh most, and all that comes later."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import max_pool1d

from coattn.errors import ConfigError
from coattn.part import check_count
from coattn.parts.call import AttentionCall
from coattn.parts.select.base import Select
from coattn.types import BlockList, Selection


@dataclass
class PromptTop(Select):
    """Attends to what was kept of the prompt for each KV head, and to every token after it.

    Blocks of one token make a block list a list of tokens. Prompts and turns attend to everything.
    """

    name = "prompt_top"
    needs = frozenset({"all_on_gpu", "positions"})
    provides = frozenset({"keeps_positions"})
    capturable = True
    fixes = {"block": 1}
    help_text = {
        "budget": "tokens of a prompt that each KV head keeps, the window included; later ones are all kept",
        "window": "last tokens of a prompt whose queries choose; they are kept themselves",
        "kernel": "positions of whose weights each one gets the largest, an odd number; 1: its own",
    }

    budget: int = 1024
    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)
        check_count("budget", self.budget, self.window + 1)
        check_count("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ConfigError(f"kernel is {self.kernel}, but must be odd.", f"Set kernel={self.kernel + 1}.")

    def is_exact(self) -> bool:
        return False

    def whole(self, tokens: int) -> dict[str, Any]:
        return {"budget": max(tokens, self.window + 1)}

    @property
    def older(self) -> int:
        """Positions before the window that each KV head keeps."""
        return self.budget - self.window

    def scores(self, weights: Tensor) -> Tensor:
        """Softmax weights `[group, queries, n]` of one KV head over a prompt -> `[n - window]` float32."""
        summed = weights.sum(1)[:, : -self.window]
        return max_pool1d(summed, self.kernel, stride=1, padding=self.kernel // 2).mean(0)

    def pick(self, call: AttentionCall) -> Selection:
        listed = call.visible.gpu
        if call.table is None:
            return call.visible
        assert listed is not None, "a decode step sees its own token"
        places, gone = self.maintenance.places(call.layer, call.table.seq, listed.longest)
        ids = listed.table.expand(-1, places.shape[1], -1).gather(2, places).contiguous()
        count = (listed.tokens - gone[:, None]).expand(-1, places.shape[1]).contiguous()
        return Selection.of(BlockList(ids, count, listed.longest))
