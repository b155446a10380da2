"""Attention weights from coded keys beside those from the keys themselves (HCAttention, section 4.3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coattn.evaluate.forced import force
from coattn.evaluate.look import Shown, attention_weights
from coattn.ops.encode_keys import encode_keys
from coattn.quantise.file import load
from coattn.runtime import Runtime
from coattn.types import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Compared(Shown):
    """Full attention; the newest token's weights once more from coded keys."""

    def __init__(self, codebook: str) -> None:
        super().__init__([self])
        self.codebook, self.scale = codebook, 1.0
        self.found: list[tuple[Tensor, Tensor]] = []
        """Per layer: weights `[q_heads, n]` from keys, and from codes."""

    def open(self, runtime: Runtime) -> None:
        super().open(runtime)
        self.books = load(self.codebook, dict(enumerate(runtime.layers)))

    def attend(self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.scale = scale
        super().attend(step, layer, q, k, v, scale)

    def see(self, layer: int, q: Tensor, keys: Tensor, weights: Tensor) -> None:
        """Called for every layer of the one decode step."""
        book = self.books[layer]
        coded = attention_weights(q, book.decode(encode_keys(book, keys)), self.scale, self.layers[layer])
        self.found.append((weights[0].double().cpu(), coded[0].double().cpu()))


def compare_codes(model: PreTrainedModel, ids: Tensor, codebook: str, shown: int = 400) -> dict[str, Any]:
    """The last token of a text `[tokens]` over all before it, layer by layer.

    -> per layer the total variation distance between the weights from codes and from keys (half the sum of absolute
    differences: the share of the mass that lies elsewhere), the mean over the heads; and of one head in each of four
    layers the first weights themselves.
    """
    compared = Compared(codebook)
    force(model, ids, len(ids) - 1, "full", score_prefill=False, probes=[compared])
    found = compared.found
    last = len(found) - 1
    curves = {layer: [x[0, :shown].tolist() for x in found[layer]] for layer in (0, last // 3, 2 * last // 3, last)}
    return {
        "tokens": len(ids),
        "moved": [float((a - b).abs().sum(-1).mean() / 2) for a, b in found],
        "correlation": [float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) for a, b in found],
        "curves": {str(layer): {"keys": pair[0], "codes": pair[1]} for layer, pair in curves.items()},
    }
