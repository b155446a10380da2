"""What the types of GGUF mean: the numbers that the package gguf makes of the same bytes."""

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from coattn.hf.gguf.blocks import READERS, numbers, packed  # noqa: E402
from coattn.hf.gguf.header import SIZES  # noqa: E402
from coattn.kernels.quantise.weights import unpack  # noqa: E402

HALVES = {
    name: [0, 2] if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [208] if name == "Q6_K" else [0]
    for name, _ in READERS.values()
    if name != "MXFP4"
} | {"Q3_K": [108]}
"""Where a block has numbers in float16."""


def random_blocks(name: str, rows: int, columns: int, seed: int = 0, spread: float | None = None) -> np.ndarray:
    """Any bytes at all, but that numbers in float16 are finite, `[rows, bytes]`. spread: of the weights."""
    generator = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[name]
    per, size = gguf.GGML_QUANT_SIZES[kind]
    raw = generator.integers(0, 256, (rows, columns // per, size), dtype=np.uint8)
    scales = {at: generator.normal(0, 0.01, (*raw.shape[:2], 1)) for at in HALVES.get(name, [])}

    def store(factor: float) -> np.ndarray:
        for at, drawn in scales.items():
            raw[..., at : at + 2] = (drawn * factor).astype(np.float16).view(np.uint8)
        return raw.reshape(rows, -1)

    if name == "MXFP4":
        raw[..., 0] = generator.integers(0, 255, raw.shape[:2]) if spread is None else 122
    found = store(1.0)
    return found if spread is None else store(spread / float(gguf.dequantize(found, kind).std()))


@pytest.mark.parametrize("kind", READERS)
def test_numbers_are_the_formats_own_bit_for_bit(kind: int) -> None:
    name = READERS[kind][0]
    raw = random_blocks(name, 24, 768)
    want = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[name]))
    made = packed(kind, torch.from_numpy(raw), 24)
    assert torch.equal(unpack(made, torch.float32), want)
    assert torch.equal(numbers(kind, torch.from_numpy(raw), (24, 768)), want)
    took = sum(x.nbytes for x in made.tensors.values())
    assert took <= 1.03 * raw.nbytes, "as many bytes as the file, but that scales of 6 bits take 8"
    order = torch.randperm(24)
    assert torch.equal(unpack(made.take(order), torch.float32), want[order])


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "IQ3_S", "F16", "BF16"])
def test_other_types_are_unpacked(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    raw = random_blocks(name, 8, 512)
    if name in ("F16", "BF16"):
        raw = np.random.default_rng(0).normal(0, 1, (8, 512)).astype(np.float16).view(np.uint8)
    want = torch.from_numpy(gguf.dequantize(raw, kind).reshape(8, 512))
    assert torch.equal(numbers(int(kind), torch.from_numpy(raw), (8, 512)).float().nan_to_num(), want.nan_to_num())


def test_sizes_are_those_of_the_package() -> None:
    own = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: own[kind] for kind in SIZES} == SIZES
