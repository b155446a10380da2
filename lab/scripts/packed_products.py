"""Times linear layers in 4 and 8 bits beside the time that their packed bytes take: `packed_products.py [FORM]`.

For each size of a layer and number of tokens: microseconds of the fastest tile, which tile, and its multiple of the
bytes' time at the speed that a copy reaches here; the last column is PyTorch's product in bfloat16. Needs a GPU.
"""

import sys
from itertools import product

import torch
import triton.testing

from coattn.kernels.quantise.weights import pack
from coattn.kernels.triton import packed_linear as kernel

SIZES = {
    "Llama-3-8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "Qwen3-32B": [(10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)],
    "Mistral-Small-24B": [(6144, 5120), (5120, 4096), (65536, 5120), (5120, 32768)],
}
TILES = list(product((16, 32, 64, 128), (2, 4, 8), (3, 4, 6)))


def time(call: object) -> float:
    """Microseconds, the L2 cache cold."""
    return float(triton.testing.do_bench(call, warmup=5, rep=20)) * 1e3


def main(form: str) -> None:
    """Prints the table of one form."""
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    speed = 2 * big.numel() / time(lambda: big.add_(1))
    print(f"bytes at {speed / 1e6:.2f} TB/s")
    for name, sizes in SIZES.items():
        for n, k in sizes:
            codes = torch.randint(0, 16 if form == "int4" else 120, (n, k), dtype=torch.uint8, device="cuda")
            codes = codes.view(torch.int8) if form == "int8" else codes
            scales = torch.rand(k // 128, n, device="cuda").half()
            weight = pack(codes, scales, None, form, 128)
            plain = torch.randn(n, k, device="cuda").bfloat16()
            floor = (weight.codes.nbytes + scales.nbytes) / speed
            for tokens in (1, 4, 16, 32):
                x = torch.randn(1, tokens, k, device="cuda").bfloat16()
                found = {}
                for tile in TILES:
                    try:
                        found[tile] = time(lambda x=x, w=weight, t=tile: kernel.packed_linear(x, w, None, None, t))
                    except Exception:  # a tile that the card has no room for
                        continue
                best = min(found, key=lambda tile: found[tile])
                own, usual = found.get(kernel.tile_of(n), 0), time(lambda x=x, w=plain: x @ w.T)
                print(f"{name:18} {n:6} x {k:6} {tokens:3} tokens: {found[best]:8.1f} us {best!s:14}", end=" ")
                print(f"{found[best] / floor:5.2f} of the floor; as launched {own:8.1f} us; bfloat16 {usual:8.1f} us")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "int4")
