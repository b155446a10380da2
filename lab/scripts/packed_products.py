"""Times linear layers in 4 to 8 bits beside the time of their packed bytes: `packed_products.py [FORM] [KIND]`.

FORM: one of `FORMS`, such as int4 or Q4_K. For each size of a layer and number of tokens: microseconds of the fastest
tile, which tile, and its multiple of the bytes' time at the speed that a copy reaches here; the last column is
PyTorch's product in bfloat16. KIND `experts`: mixtures instead, microseconds of both matrices, beside the bytes of the
experts in use. KIND `prompts`: only how long prompts unpack a matrix, beside the product. Needs a GPU.
"""

import sys
from itertools import product

import torch
import triton.testing

from coattn.hf.quantised.formats import each_of
from coattn.kernels.quantise.weights import HIGH_BITS, NARROW, SUPER, Packed, pack
from coattn.kernels.triton import packed_experts as mixture
from coattn.kernels.triton import packed_linear as kernel

SIZES = {
    "Llama-3-8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "Qwen3-32B": [(10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)],
    "Mistral-Small-24B": [(6144, 5120), (5120, 4096), (65536, 5120), (5120, 32768)],
}
MIXTURES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "gpt-oss-120b": (128, 4, 2880, 2880)}
"""Experts, those of a token, hidden size, inner size."""
FORMS = {
    "int4": ("int4", 128, "half", None),
    "int8": ("int8", 128, "half", None),
    "fp8": ("fp8", 128, "half", None),
    "Q4_0": ("int4", 32, "half", None),
    "Q4_K": ("int4", 32, "uint8", "uint8"),
    "Q5_K": ("int5", 32, "uint8", "uint8"),
    "Q6_K": ("int6", 16, "int8", None),
    "Q8_0": ("int8", 32, "half", None),
    "IQ4_XS": ("iq4", 32, "int8", None),
    "mxfp4": ("fp4", 32, "powers", None),
    "nf4": ("nf4", 64, "float", None),
}
"""Form, columns that share a scale, how scales and minima are stored."""
TILES = list(product((16, 32, 64, 128), (2, 4, 8), (3, 4, 6)))
UNPACK_TILES = ((32, 4), (16, 2), (16, 4), (32, 2), (32, 8), (64, 4), (64, 8), (128, 8))
"""The first as launched."""


def time(call: object) -> float:
    """Microseconds, the L2 cache cold."""
    return float(triton.testing.do_bench(call, warmup=5, rep=20)) * 1e3


def random_weight(name: str, n: int, k: int) -> Packed:
    """A matrix of random codes."""
    form, group, scales, minima = FORMS[name]
    top = 2 ** (4 + HIGH_BITS.get(form, 0)) if form in NARROW else 120
    codes = torch.randint(0, top, (n, k), dtype=torch.uint8, device="cuda")
    shape, supers = (k // group, n), None
    if scales in ("half", "float"):
        first = torch.rand(shape, device="cuda").to(torch.float16 if scales == "half" else torch.float32)
    else:
        dtype = torch.int8 if scales == "int8" else torch.uint8
        first = torch.randint(*((118, 124) if scales == "powers" else (1, 32)), shape, dtype=dtype, device="cuda")
        if scales != "powers":
            supers = torch.rand(1 + (minima is not None), -(-k // SUPER), n, device="cuda").half()
    zeros = None if minima is None else torch.randint(0, 64, shape, dtype=torch.uint8, device="cuda")
    return pack(codes.view(torch.int8) if form == "int8" else codes, first, zeros, form, group, 1, supers)


def main(form: str) -> None:
    """Prints the table of one form."""
    speed = copy_speed()
    for name, sizes in SIZES.items():
        for n, k in sizes:
            weight = random_weight(form, n, k)
            plain = torch.randn(n, k, device="cuda").bfloat16()
            floor = weight.nbytes / speed
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
            unpacking(f"{name:18} {n:6} x {k:6}", weight, floor + plain.nbytes / speed)


def prompts(form: str) -> None:
    """Prints what prompts do with matrices of one form alone."""
    speed = copy_speed()
    for name, sizes in SIZES.items():
        for n, k in sizes:
            weight = random_weight(form, n, k)
            unpacking(f"{name:18} {n:6} x {k:6}", weight, (weight.nbytes + 2 * n * k) / speed)


def unpacking(name: str, weight: Packed, floor: float) -> None:
    """Prints how long a prompt unpacks a matrix, and what of its product that is. floor: microseconds of the bytes."""
    n, k = weight.out_features, weight.in_features
    tiles = {tile: time(lambda tile=tile: kernel.unpack(weight, torch.bfloat16, tile)) for tile in UNPACK_TILES}
    best, took = min(tiles, key=lambda tile: tiles[tile]), tiles[UNPACK_TILES[0]]
    x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (4096, n))
    whole = time(lambda: x @ w.T)
    print(
        f"{name} unpacked: {took:8.1f} us, {took / floor:5.2f} of the floor, {took / whole:5.3f} of a product", end=""
    )
    print(f" of 4,096 tokens; {tiles[best]:8.1f} us with {best}")


def mixtures(form: str) -> None:
    """Prints the table of one form for experts, those of each token drawn by themselves."""
    speed = copy_speed()
    for name, (count, top, hidden, inner) in MIXTURES.items():
        if hidden % FORMS[form][1] or inner % FORMS[form][1]:
            continue
        first = each_of(random_weight(form, count * 2 * inner, hidden), count)
        second = each_of(random_weight(form, count * hidden, inner), count)
        for tokens in (1, 4, 16, 32):
            x = torch.randn(tokens, hidden, device="cuda").bfloat16()
            index = torch.rand(tokens, count, device="cuda").argsort(-1)[:, :top].contiguous()
            weights = torch.rand(tokens, top, device="cuda").bfloat16()
            given = x, index, weights, (first, None), (second, None), lambda y: y[..., ::2] * y[..., 1::2]
            took = time(lambda given=given: mixture.packed_experts(*given))
            read = (first.nbytes + second.nbytes) * len(index.unique()) / count / speed
            print(f"{name:14} {tokens:3} tokens: {took:8.1f} us, {took / read:5.2f} of the bytes of experts in use")


def copy_speed() -> float:
    """Bytes a microsecond."""
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    speed = 2 * big.numel() / time(lambda: big.add_(1))
    print(f"bytes at {speed / 1e6:.2f} TB/s")
    return speed


if __name__ == "__main__":
    chosen = next((word for word in sys.argv[1:] if word in FORMS), "int4")
    (mixtures if "experts" in sys.argv else prompts if "prompts" in sys.argv else main)(chosen)
