"""Random matrices in every internal form, and what they are as plain numbers."""

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.quantise.weights import HIGH_BITS, NARROW, OFFSET, TABLES, Packed, pack


class Form(NamedTuple):
    """form; columns and rows that share a scale (0: all); zeros in codes, in weights or none; how scales are stored."""

    form: str
    group: int
    rows: int
    zeros: str | None = None
    scales: str = "half"


FORMS = {
    "int4": Form("int4", 32, 1),
    "int4 zeros": Form("int4", 64, 1, "codes"),
    "int4 rows": Form("int4", 0, 1),
    "int4 mins": Form("int4", 32, 1, "weights"),
    "int4 supers": Form("int4", 32, 1, "weights", "supers"),
    "int4 pairs": Form("int4", 16, 1, "codes"),
    "int5": Form("int5", 32, 1),
    "int5 wide": Form("int5", 64, 1, "weights"),
    "int5 supers": Form("int5", 32, 1, "weights", "supers"),
    "int6 supers": Form("int6", 16, 1, None, "supers"),
    "iq4 supers": Form("iq4", 32, 1, None, "supers"),
    "fp4": Form("fp4", 32, 1, None, "powers"),
    "nf4": Form("nf4", 64, 1),
    "int8": Form("int8", 32, 1),
    "int8 zeros": Form("int8", 0, 1, "codes"),
    "fp8": Form("fp8", 0, 0),
    "fp8 rows": Form("fp8", 0, 1),
    "fp8 blocks": Form("fp8", 128, 16),
}


def random_packed(form: Form, n: int, k: int, device: torch.device, seed: int = 0) -> tuple[Packed, Tensor]:
    """A matrix, and the same in float64 `[n, k]`, written as the textbook has it."""
    generator = torch.Generator().manual_seed(seed)
    group, rows = form.group or k, form.rows or n
    shape = (-(-k // group), -(-n // rows))
    bits = 4 + HIGH_BITS.get(form.form, 0)
    low, high = {"int8": (-128, 128), "fp8": (0, 255)}.get(form.form, (0, 2**bits))
    codes = torch.randint(low, high, (n, k), generator=generator)
    if form.form == "fp8":
        codes[codes == 127] = 126  # 127 and 255 are no numbers
    numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).double() if form.form == "fp8" else codes.double()
    if form.form in TABLES:
        numbers = torch.tensor(TABLES[form.form], dtype=torch.float64)[codes]
    supers = None
    scales = (torch.rand(shape, generator=generator) * 0.01 + 0.001).half()
    zeros = (torch.rand(shape, generator=generator) * 0.1).half() if form.zeros == "weights" else None
    if form.zeros == "codes":
        zeros = torch.randint(low, high, shape, generator=generator).to(torch.int8)
    exact = [scales.double(), None if zeros is None else zeros.double()]
    if form.scales == "powers":
        scales = torch.randint(118, 124, shape, generator=generator).to(torch.uint8)
        exact[0] = 2.0 ** (scales.double() - 127)
    elif form.scales == "supers":
        signed = form.zeros is None
        spread = [-32, 32] if signed else [0, 64]
        scales = torch.randint(*spread, shape, generator=generator).to(torch.int8 if signed else torch.uint8)
        zeros = None if zeros is None else torch.randint(0, 64, shape, generator=generator).to(torch.uint8)
        parts = [scales] if zeros is None else [scales, zeros]
        supers = (torch.rand(len(parts), -(-k // 256), n, generator=generator) * 1e-3).half()
        of_group = torch.arange(shape[0]) * group // 256
        exact = [x.double() * d.double()[of_group] for x, d in zip(parts, supers, strict=True)]
    wide = [
        None if x is None else x.T.repeat_interleave(rows, 0)[:n].repeat_interleave(group, 1)[:, :k]
        for x in (*exact, None)[:2]
    ]
    assert wide[0] is not None
    if form.zeros == "codes":
        numbers = (numbers - wide[1]) * wide[0]
    elif form.zeros == "weights":
        numbers = numbers * wide[0] - wide[1]
    else:
        numbers = (numbers - OFFSET.get(form.form, 0)) * wide[0]
    kept = codes.to(torch.int8 if form.form == "int8" else torch.uint8).to(device)
    given = (None if x is None else x.to(device) for x in (scales, zeros))
    made = pack(kept, *given, form.form, group, rows, None if supers is None else supers.to(device))
    return made, numbers.to(device)


def bytes_of_codes(form: Form, n: int, k: int) -> int:
    """Of a matrix in this form."""
    return n * k * (4 + HIGH_BITS.get(form.form, 0) if form.form in NARROW else 8) // 8
