"""Times the kernels of experts over a few tokens by tile: `expert_tiles.py [SECONDS]`, 30 in all if not given.

For each model and number of tokens: microseconds of a layer's experts, both products, for every tile of the first and
of the second one, and their multiple of the time that the bytes of the experts in use take. Needs a GPU.
"""

import sys
import time
from dataclasses import dataclass
from itertools import product

import torch
import triton.testing
from torch import Tensor

from coattn.kernels.triton.experts import Tiles, experts, tiles_of

MODELS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "GLM-4.5-Air": (128, 8, 4096, 1408),
    "Mixtral-8x7B": (8, 2, 4096, 14336),
}
"""Experts, those that a token uses, hidden size, and the size inside an expert."""
ONE = {
    "gates": ((2, 2048, 4, 1), (4, 1024, 4, 1), (8, 512, 4, 2), (4, 2048, 8, 1), (8, 1024, 8, 1)),
    "down": ((4, 256, 4, 1), (8, 128, 4, 2), (2, 512, 4, 1), (4, 128, 2, 2), (8, 256, 8, 1)),
}
FEW = {
    "gates": ((32, 128, 4, 4), (16, 256, 4, 4), (64, 64, 4, 5), (32, 256, 8, 3), (16, 128, 4, 6)),
    "down": ((64, 128, 4, 4), (32, 128, 4, 5), (128, 64, 4, 4), (32, 256, 4, 3), (16, 256, 4, 4)),
}


@dataclass
class Layer:
    """Of one layer, and of a step whose tokens choose their experts at random."""

    x: Tensor
    index: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor

    def run(self, tiles: Tiles) -> Tensor:
        made: Tensor = experts(self.x, self.index, self.weights, self.gate_up, self.down, self.x, tiles)
        return made

    @property
    def nbytes(self) -> int:
        """Of the experts in use."""
        return len(set(self.index.flatten().tolist())) * (self.gate_up[0].nbytes + self.down[0].nbytes)


def layer(name: str, tokens: int, device: torch.device) -> Layer:
    """Random numbers in a model's sizes."""
    count, top, hidden, inner = MODELS[name]
    wide, down = ((count, 2 * inner, hidden), (count, hidden, inner))
    index = torch.rand(tokens, count, device=device).argsort(-1)[:, :top].contiguous()
    drawn = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in (wide, down, (tokens, hidden))]
    return Layer(drawn[2], index, torch.rand(tokens, top, device=device).bfloat16(), *drawn[:2])


def microseconds(own: Layer, tiles: Tiles) -> float:
    """The L2 cache cold; infinite for a tile that the card has no room for."""
    try:
        return float(triton.testing.do_bench(lambda: own.run(tiles), warmup=3, rep=12)) * 1e3
    except Exception:
        return float("inf")


def main(seconds: float) -> None:
    """Prints a line for each model and number of tokens; stops when the time is over."""
    until, device = time.monotonic() + seconds, torch.device("cuda")
    big = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    speed = 2 * big.numel() / float(triton.testing.do_bench(lambda: big.add_(1), warmup=3, rep=12)) / 1e3
    print(f"bytes at {speed / 1e6:.2f} TB/s")
    for name, tokens in product(MODELS, (1, 4)):
        own, (_, top, hidden, inner) = layer(name, tokens, device), MODELS[name]
        launched = tiles_of(tokens, hidden, inner, top)
        found = {launched: microseconds(own, launched)}
        # one product after the other: the second is tried with the best of the first
        for part, tiles in (ONE if tokens == 1 else FEW).items():
            best = min(found, key=lambda each: found[each])
            for tile in tiles:
                if time.monotonic() < until:
                    made = best._replace(**{part: tile})
                    found[made] = found.get(made) or microseconds(own, made)
        best, floor = min(found, key=lambda each: found[each]), own.nbytes / speed
        print(f"{name:14} {tokens} tokens: as launched {found[launched]:6.1f} us, {found[launched] / floor:.2f} of its")
        print(f"  floor; best {found[best]:6.1f} us, {found[best] / floor:.2f}: gates {best.gates}, down {best.down}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
