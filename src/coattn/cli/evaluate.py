"""`coattn eval`: the quality of a method. The commands are in `eval_*.py`; this is what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from coattn.cli.options import (
    count_option,
    join,
    json_option,
    load_model,
    method_options,
    model_options,
    out_option,
    text_option,
)
from coattn.errors import InputError
from coattn.text import Text, read_text

if TYPE_CHECKING:
    from torch import Tensor

    from coattn.hf.load import Check, Loaded
    from coattn.tools.evaluate.windows import Windows

LENGTH, DECODE = 2048, 128
"""Default length of a window in tokens, and how many of them are decode steps."""


@click.group("eval")
def evaluate() -> None:
    """Compare the quality of a method with full attention, on your model and text."""


text_options = join(
    model_options,
    text_option,
    count_option(
        "--length",
        None,
        "Length of the text in tokens; without --stride and --prefill, of the only window.  "
        f"[default: {LENGTH}, or what the other options need]",
        4,
    ),
    count_option("--prefill", None, "Tokens of each window that are prefilled exactly."),
    count_option("--decode", None, f"Decode steps of each window.  [default: {DECODE}]"),
    count_option("--stride", None, "Distance between windows in tokens.  [default: one window]"),
    count_option("--start", 0, "Token at which the first window begins.", 0),
    count_option("--batch", 4, "Windows evaluated together, at most."),
    out_option,
    json_option,
)
"""Options of every evaluation that forces a text through a model."""
shared_options = join(text_options, method_options())


class Subject(NamedTuple):
    """A model, and the windows of a text that it is evaluated on."""

    loaded: Loaded
    text: Text
    ids: Tensor
    windows: Windows

    @property
    def dtype(self) -> str:
        """Of the model, as options name it."""
        return str(self.loaded.model.dtype).removeprefix("torch.")

    def config(self) -> dict[str, Any]:
        """The subject's part of a result."""
        return {
            "model": self.loaded.name,
            "dtype": self.dtype,
            "text": self.text.as_dict(),
            "length": self.windows.length,
            "prefill": self.windows.prefill,
            "starts": list(self.windows.starts),
        }

    def where(self) -> str:
        """The last line for people."""
        count = len(self.windows.starts)
        windows = "" if count == 1 else f"{count} windows of "
        return f"{self.loaded.name} ({self.dtype}), {windows}{self.windows.length:,} tokens of {self.text.name}"


def prepare(options: dict[str, Any]) -> Subject:
    """Reads the text, loads the model and cuts the windows."""
    text = read_text(options["text_file"])

    from coattn.tools.evaluate.windows import choose

    decode, length = options["decode"] or DECODE, options["length"]
    if options["prefill"] is not None:
        named, wanted = "--prefill and --decode make", options["prefill"] + decode
    else:
        length = length or LENGTH
        named, wanted = "--length is", length

    def check(_: Any, limit: int | None) -> None:
        if limit is not None and wanted > limit:
            raise InputError(
                f"{named} {wanted:,}, but {options['model']} has only {limit:,} positions.", f"Give {limit} or less."
            )

    loaded = load_to_compare(options, check)
    ids = loaded.tokenizer(text.body, return_tensors="pt", verbose=False).input_ids[0]
    given = {name: options[name] for name in ("prefill", "start", "stride")}
    windows = choose(len(ids), decode=decode, length=length, name=text.name, **given)
    return Subject(loaded, text, ids, windows)


def load_to_compare(options: dict[str, Any], check: Check | None = None) -> Loaded:
    """The model that --model, --dtype and --device name; on a CPU it computes in float32 unless --dtype says otherwise:
    rounding to bfloat16 costs more (KL about 1e-3) than some methods do."""
    from coattn.hf.load import choose_device

    on_cpu = choose_device(options["device"]).type == "cpu"
    dtype = "float32" if options["dtype"] == "auto" and on_cpu else options["dtype"]
    return load_model({**options, "dtype": dtype}, check=check)
