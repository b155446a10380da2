"""Random matrices in every internal form, and what they are as plain numbers."""

from typing import NamedTuple

import torch
from torch import Tensor

from coattn.kernels.quantise.weights import Packed, pack


class Form(NamedTuple):
    """form, columns and rows that share a scale (0: all), whether there are zeros."""

    form: str
    group: int
    rows: int
    zeros: bool


FORMS = {
    "int4": Form("int4", 32, 1, False),
    "int4 zeros": Form("int4", 64, 1, True),
    "int4 rows": Form("int4", 0, 1, False),
    "int8": Form("int8", 32, 1, False),
    "int8 zeros": Form("int8", 0, 1, True),
    "fp8": Form("fp8", 0, 0, False),
    "fp8 rows": Form("fp8", 0, 1, False),
    "fp8 blocks": Form("fp8", 128, 16, False),
}


def random_packed(form: Form, n: int, k: int, device: torch.device, seed: int = 0) -> tuple[Packed, Tensor]:
    """A matrix, and the same in float64 `[n, k]`, written as the textbook has it."""
    generator = torch.Generator().manual_seed(seed)
    group, rows = form.group or k, form.rows or n
    shape = (-(-k // group), -(-n // rows))
    low, high = {"int4": (0, 16), "int8": (-128, 128), "fp8": (0, 255)}[form.form]
    codes = torch.randint(low, high, (n, k), generator=generator)
    if form.form == "fp8":
        codes[codes == 127] = 126  # 127 and 255 are no numbers
    scales = (torch.rand(shape, generator=generator) * 0.01 + 0.001).half()
    zeros = torch.randint(low, high, shape, generator=generator) if form.zeros else None
    numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).double() if form.form == "fp8" else codes.double()
    wide = [x.double().T.repeat_interleave(rows, 0)[:n].repeat_interleave(group, 1)[:, :k] for x in (scales,)]
    if zeros is not None:
        numbers = numbers - zeros.double().T.repeat_interleave(rows, 0)[:n].repeat_interleave(group, 1)[:, :k]
    elif form.form == "int4":
        numbers = numbers - 8
    kept = codes.to(torch.int8 if form.form == "int8" else torch.uint8).to(device)
    made = pack(
        kept, scales.to(device), None if zeros is None else zeros.to(torch.int8).to(device), form.form, group, rows
    )
    return made, (numbers * wide[0]).to(device)
