"""Options and engine of evaluations in which the model answers prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from coattn.cli.options import (
    Count,
    count_option,
    gpu_kv_option,
    host_kv_option,
    join,
    json_option,
    method_option,
    model_options,
    parse_settings,
    settings_option,
)
from coattn.cli.output import model_progress
from coattn.errors import ConfigError
from coattn.units import parse_share

if TYPE_CHECKING:
    from coattn.method.row import Composed
    from coattn.tools.evaluate.asking import Asker


def answer_options(out_help: str) -> Callable[[Any], Any]:
    """--model to --json, the same for every such evaluation."""
    share = "Limit the KV cache in GPU memory to this share of each prompt's, such as 1/8."
    chunk = "Prompt tokens per step.  [default: whole prompts, read exactly]"
    return join(
        model_options,
        method_option(),
        gpu_kv_option,
        click.option("--gpu-share", metavar="SHARE", help=share),
        host_kv_option,
        settings_option,
        click.option("--chunk", type=Count(1), help=chunk),
        count_option("--batch", 8, "Prompts answered together."),
        click.option("--out", "target", metavar="FILE", help=out_help),
        json_option,
    )


def composed_method(options: dict[str, Any]) -> Composed:
    """Checks the method and its parameters before the model is loaded, and makes --gpu-share a number."""
    from coattn.method.row import compose
    from coattn.method.table import find_method

    options["gpu_share"] = parse_share(options["gpu_share"], "--gpu-share")
    if options["gpu_share"] is not None and options["gpu_kv"] is not None:
        raise ConfigError("--gpu-kv and --gpu-share exclude each other.", "Give one of them.")
    return compose(find_method(options["method"]), **parse_settings(options["settings"]))


def open_asker(options: dict[str, Any], composed: Composed) -> Asker:
    """The model, loaded, under the method."""
    from coattn.hf.load import load
    from coattn.tools.evaluate.asking import Asker

    with model_progress() as show:
        loaded = load(options["model"], dtype=options["dtype"], device=options["device"], on_progress=show)
    memory = {name: options[name] for name in ("gpu_kv", "host_kv", "gpu_share")}
    return Asker(
        loaded,
        composed.method,
        parse_settings(options["settings"]),
        **memory,
        batch=options["batch"],
        chunk=options["chunk"],
    )
