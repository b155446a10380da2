"""What evaluations share that let the model answer: options and the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from coattn.cli.options import Count, json_option, model_options, parse_settings
from coattn.cli.output import model_progress
from coattn.errors import ConfigError
from coattn.units import parse_share

if TYPE_CHECKING:
    from coattn.method.row import Composed
    from coattn.tools.evaluate.asking import Asker


def answer_options(out_help: str) -> Callable[[Any], Any]:
    """--model to --json, the same for every such evaluation."""

    def decorate(command: Any) -> Any:
        for option in (
            json_option,
            click.option("--out", "target", metavar="FILE", help=out_help),
            click.option("--batch", default=8, show_default=True, type=Count(1), help="Prompts at a time."),
            click.option(
                "--chunk", type=Count(1), help="Prompt tokens per step; default: whole prompts, read exactly."
            ),
            click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of the method."),
            click.option("--host-kv", metavar="SIZE", help='Most KV memory in DRAM, such as "8GiB".'),
            click.option(
                "--gpu-share", metavar="SHARE", help="GPU KV memory as a share of each prompt's, such as 1/8."
            ),
            click.option("--gpu-kv", metavar="SIZE", help='Most KV memory in the GPU tier, such as "2GiB".'),
            click.option(
                "--method", default="full", show_default=True, help="A name from `coattn methods`, or rows.toml[:name]."
            ),
            model_options,
        ):
            command = option(command)
        return command

    return decorate


def composed_method(options: dict[str, Any]) -> Composed:
    """The method with its parameters, checked before anything is loaded; --gpu-share becomes a number."""
    from coattn.method.row import compose
    from coattn.method.table import find_method

    options["gpu_share"] = parse_share(options["gpu_share"], "--gpu-share")
    if options["gpu_share"] is not None and options["gpu_kv"] is not None:
        raise ConfigError("Both --gpu-kv and --gpu-share are given.", "Leave one out.")
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
