"""Which KV heads are retrieval heads: labels in a file, and what they were made of."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coattn.errors import ConfigError
from coattn.kernels.quantise.file import same_mark
from coattn.types import LayerShape

FORMAT = "coattn-heads-1"
HOW = "Make one with `coattn calibrate duo`."


class HeadLabels(NamedTuple):
    """What a file says: of every layer and KV head how it scored, and whether it is a retrieval head."""

    model: str
    marks: list[float | None]
    """One number of each layer's own weights, by which another model is told apart."""
    sinks: int
    recent: int
    """Tokens within so few of either end do not count for the scores."""
    rho: float
    """The share of KV heads that are retrieval heads."""
    scores: list[list[float | None]]
    retrieval: list[list[bool]]
    method: str = "needle mass"
    prompts: int = 0
    text: str = ""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **self._asdict()}, indent=1) + "\n", encoding="utf-8")

    def of(self, layers: Mapping[int, LayerShape], path: str) -> dict[int, list[bool]]:
        """Labels of these layers. Raises ConfigError where they are another model's."""
        for i, shape in layers.items():
            known = i < len(self.retrieval) and len(self.retrieval[i]) == shape.kv_heads
            if not known or not same_mark(shape.mark, self.marks[i]):
                raise ConfigError(
                    f"The labels of heads {path} were made for {self.model}, not for the model in use.",
                    "Make them for this model with `coattn calibrate duo`.",
                )
        return {i: self.retrieval[i] for i in layers}


def read_labels(path: str) -> HeadLabels:
    """Labels from a file. Raises ConfigError where it does not hold any."""
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path} with labels of heads.", HOW) from None
    except (OSError, ValueError):  # ValueError: not UTF-8, not JSON, or a path with a null byte
        raise ConfigError(f"{path} cannot be read as labels of heads: it is not a JSON file.", HOW) from None
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ConfigError(f"{path} does not hold labels of heads of this version.", HOW)
    try:
        labels = HeadLabels(**data)
        rows = [[head if isinstance(head, bool) else None for head in layer] for layer in labels.retrieval]
        whole = all(None not in row for row in rows) and len(rows) == len(labels.marks)
        whole = whole and all(mark is None or isinstance(mark, int | float) for mark in labels.marks)
    except TypeError:
        whole = False
    if not whole:
        raise ConfigError(f"{path} is damaged: its labels of heads are not one true or false for each.", HOW)
    return labels


def retrieval_heads(scores: list[list[float | None]], rho: float) -> list[list[bool]]:
    """The share `rho` of all KV heads with the highest scores, at least one; heads without a score are none."""
    order = sorted(
        ((score, i, h) for i, layer in enumerate(scores) for h, score in enumerate(layer) if score is not None),
        key=lambda item: (-item[0], *item[1:]),
    )
    best = {(i, h) for _, i, h in order[: max(1, round(rho * len(order)))]}
    return [[(i, h) in best for h in range(len(layer))] for i, layer in enumerate(scores)]
