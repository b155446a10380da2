"""`coattn eval`: what a method costs in quality. The commands are in `eval_*.py`; this is what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from coattn.cli.options import Count, json_option, method_options, model_options
from coattn.cli.output import model_progress
from coattn.errors import InputError
from coattn.text import Text, read_text

if TYPE_CHECKING:
    from torch import Tensor

    from coattn.hf.load import Loaded
    from coattn.tools.evaluate.windows import Windows

LENGTH, DECODE = 2048, 128
"""Tokens of a window, and those of them that are decode steps, where no option says otherwise."""


@click.group("eval")
def evaluate() -> None:
    """Measure what a method costs in quality, with your model and text, against full attention in the same run."""


def text_options(command: Any) -> Any:
    """Options of every evaluation that forces a text through a model."""
    for option in (
        json_option,
        click.option("--out", "target", metavar="FILE", help="Also write the JSON there."),
        click.option("--batch", default=4, show_default=True, type=Count(1), help="Windows at a time, at most."),
        click.option("--start", default=0, show_default=True, type=Count(0), help="Where windows begin."),
        click.option("--stride", type=Count(1), help="A window every so many tokens; default: one window."),
        click.option("--decode", type=Count(1), help=f"Decode steps of a window.  [default: {DECODE}]"),
        click.option("--prefill", type=Count(1), help="Tokens that each window prefills exactly."),
        click.option(
            "--length",
            type=Count(4),
            help="Tokens of the text; without --stride and --prefill, of the one window.  "
            f"[default: {LENGTH}, or what the other options need]",
        ),
        click.option("--text", "text_file", metavar="FILE", help="A UTF-8 text; default: the help topics of Python."),
        model_options,
    ):
        command = option(command)
    return command


def shared_options(command: Any) -> Any:
    """`text_options` and those of a method."""
    return text_options(method_options()(command))


@dataclass(frozen=True)
class Subject:
    """A model, and the windows of a text that it will be measured on."""

    loaded: Loaded
    text: Text
    ids: Tensor
    windows: Windows

    @property
    def dtype(self) -> str:
        """Of the model, as options name it."""
        return str(self.loaded.model.dtype).removeprefix("torch.")

    def config(self) -> dict[str, Any]:
        """What of a result its subject decides."""
        return {
            "model": self.loaded.name,
            "dtype": self.dtype,
            "text": {"name": self.text.name, "sha256": self.text.sha256},
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
    loaded = load_model(options)

    from coattn.hf.generate import positions
    from coattn.tools.evaluate.windows import choose

    decode, length = options["decode"] or DECODE, options["length"]
    if options["prefill"] is None and length is None:
        length = LENGTH
    limit = positions(loaded)
    wanted = options["prefill"] + decode if options["prefill"] is not None else length
    if limit is not None and wanted > limit:
        named = "--prefill and --decode make" if options["prefill"] is not None else "--length is"
        raise InputError(
            f"{named} {wanted:,}, but {loaded.name} has only {limit:,} positions.", f"Give {limit} or less."
        )
    ids = loaded.tokenizer(text.body, return_tensors="pt", verbose=False).input_ids[0]
    windows = choose(
        len(ids),
        decode=decode,
        prefill=options["prefill"],
        length=length,
        start=options["start"],
        stride=options["stride"],
        name=text.name,
    )
    return Subject(loaded, text, ids, windows)


def load_model(options: dict[str, Any]) -> Loaded:
    """The model that --model, --dtype and --device name."""
    from coattn.hf.load import choose_device, load

    with model_progress() as show:
        device = choose_device(options["device"])
        # on the CPU float32: rounding to bfloat16 costs more (KL about 1e-3) than some methods do
        dtype = "float32" if options["dtype"] == "auto" and device.type == "cpu" else options["dtype"]
        return load(options["model"], dtype=dtype, device=device, on_progress=show)
