"""Options that several commands share."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from coattn.errors import ConfigError
from coattn.part import MOST, MOST_BATCH
from coattn.progress import progress_line
from coattn.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from coattn.hf.load import Check, Loaded
    from coattn.method.row import Composed, Method

F = TypeVar("F", bound=Callable[..., Any])


WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
THOUSANDS = re.compile(r"[0-9]+(\.[0-9]+)?(k|m)i?", re.IGNORECASE)


def whole(text: str) -> int:
    """`"4096"`, `"32k"` -> a number. Raises ValueError otherwise."""
    if THOUSANDS.fullmatch(text.strip()):
        try:
            return parse_count(text, "A number")
        except ConfigError as error:
            raise ValueError from error
    if not WHOLE.fullmatch(text.strip()):
        raise ValueError
    return int(text)


class Count(click.IntRange):
    """A whole number, at most `MOST`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            value = whole(value) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        number = super().convert(value, param, ctx)
        if number > MOST:
            self.fail(f"{number} is larger than {MOST}.", param, ctx)
        return number


class Number(click.FloatRange):
    """A finite number: click lets nan through every range, and infinity through an open one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def count_option(
    name: str, default: int | None, text: str, least: int = 1, most: int | None = None
) -> Callable[[Any], Any]:
    """An option for a whole number from `least` to `most`."""
    return click.option(name, default=default, type=Count(least, most), help=text)


def numbers(_context: Any, parameter: Any, value: str | None) -> list[int] | None:
    """The callback of an option that takes a list: `"1,4,8"` -> `[1, 4, 8]`."""
    if value is None:
        return None
    try:
        made = [whole(part) for part in value.split(",")]
    except ValueError:
        made = []
    most = MOST_BATCH if parameter.name == "batch" else MOST
    if not made or min(made) < 1 or max(made) > most:
        raise ConfigError(
            f"--{parameter.name.replace('_', '-')} is {value!r}.",
            f"Write numbers from 1 to {most} with commas, like 1,4,8.",
        )
    return made


def join(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one decorator; help lists them in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_options = join(
    click.option(
        "--model",
        default="smollm2",
        help="The model: smollm2, a folder, a GGUF file or a name on the Hugging Face hub.",
    ),
    click.option("--dtype", default="auto", help="Numbers it computes in: auto, float32, bfloat16 or float16."),
    click.option("--device", default="auto", help="Where it runs: auto, cpu, cuda or cuda:N."),
)
devices_options = join(
    click.option("--devices", metavar="LIST", help="Split the layers over devices, such as cuda:0,cuda:1."),
    click.option("--device-shares", metavar="LIST", help="Share of the bytes that each device holds, such as 3,1."),
)
settings_option = click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a parameter of the method. May be repeated."
)
gpu_kv_option = click.option("--gpu-kv", metavar="SIZE", help="Limit the KV cache in GPU memory, such as 512MiB.")
host_kv_option = click.option("--host-kv", metavar="SIZE", help="Limit the KV cache in DRAM, such as 8GiB.")
text_option = click.option(
    "--text", "text_file", metavar="FILE", help="Read this UTF-8 text instead of the help topics of Python."
)
out_option = click.option("--out", "target", metavar="FILE", help="Also write the JSON to FILE.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
weights_option = click.option(
    "--weights-on-gpu",
    type=Number(0, 1),
    metavar="SHARE",
    help="Keep this share of the layers' weights in GPU memory and copy the others from DRAM in every step.",
)
CHOSEN = "full if the KV cache fits in GPU memory or there is no GPU, else auto"


def method_options(default: str | None = "full") -> Callable[[F], F]:
    """--method, --gpu-kv, --host-kv, --set. default: of the method; None: the engine chooses."""
    text = "The method: a name from `coattn methods`, or a file with your own, as rows.toml[:name]."
    shown = CHOSEN if default is None else None
    method = click.option("--method", default=default, show_default=shown, help=text)
    return join(method, gpu_kv_option, host_kv_option, settings_option)


def length_option(what: str) -> Callable[[F], F]:
    """--max-length."""
    default = "the model's positions, or as many as fit in memory"
    return count_option("--max-length", None, f"Longest {what} in tokens, such as 32k.  [default: {default}]", 2)


sampling_options = join(
    count_option("--max-new-tokens", None, "Longest answer in tokens.  [default: 2048]"),
    click.option(
        "--temperature",
        default=None,
        type=Number(0),
        help="Randomness; 0 is greedy.  [default: as the model's generation config says, or 0]",
    ),
    click.option(
        "--top-p",
        default=None,
        type=Number(0, 1, min_open=True),
        help="Sample from the most likely tokens whose probabilities add up to this.",
    ),
)
"""--max-new-tokens, --temperature, --top-p; the defaults are those of `SamplingParams`."""


@dataclass(frozen=True)
class EngineOptions:
    """The values of `engine_options`: a model, and the method it runs under."""

    model: str
    dtype: str
    device: str
    method: str | None
    gpu_kv: str | None
    host_kv: str | None
    settings: tuple[str, ...]
    weights_on_gpu: float | None
    devices: str | None
    device_shares: str | None
    progress: bool

    @cached_property
    def params(self) -> dict[str, Any]:
        """The method's parameters."""
        return parse_settings(self.settings)

    @cached_property
    def division(self) -> tuple[list[str], list[float] | None] | None:
        """The devices and their shares; None: one device."""
        return parse_devices(self.devices, self.device_shares)

    @property
    def memory(self) -> dict[str, Any]:
        """Limits of GPU memory and DRAM, and the devices."""
        limits = {"gpu_kv": self.gpu_kv, "host_kv": self.host_kv, "weights_on_gpu": self.weights_on_gpu}
        if self.division is None:
            return limits
        names, shares = self.division
        return {**limits, "devices": names, "device_shares": shares}

    @cached_property
    def row(self) -> Method | None:
        """The method; None: the engine chooses. Raises before a model is loaded if an option or the model is wrong."""
        from coattn.hf.models import CATALOG, resolve

        if self.model not in CATALOG:
            resolve(self.model)  # a folder that does not run is refused before PyTorch is imported

        from coattn.engine.method_choice import candidates
        from coattn.method.row import compose
        from coattn.method.table import find_method

        row = None if self.method is None else find_method(self.method)
        if row is None:
            candidates(self.params)
        else:
            compose(row, **self.params)
        parse_bytes(self.host_kv, "--host-kv")
        for size in [self.gpu_kv] if self.division is None or not self.gpu_kv else self.gpu_kv.split(","):
            parse_bytes(size, "--gpu-kv")
        if self.division is not None:
            from coattn.engine.devices import Devices

            Devices.of(*self.division, self.gpu_kv, self.device, self.weights_on_gpu)
        return row

    def load(self, check: Check | None = None) -> Loaded:
        """Loads the model, with a line on stderr that says how far it is. check: as `load` has it."""
        device = self.device if self.division is None else self.division[0][0].partition(":")[0]
        on_host = self.weights_on_gpu is not None or self.division is not None
        return load_model({**vars(self), "device": device}, on_host, self.progress, check)


def bundle(kind: type[Any], argument: str, *options: Callable[[Any], Any]) -> Callable[[F], F]:
    """These options as one argument: the dataclass `kind`, whose fields they are."""
    names = [each.name for each in fields(kind)]

    def decorate(command: F) -> F:
        @wraps(command)
        def run(**given: Any) -> Any:
            return command(**{argument: kind(**{name: given.pop(name) for name in names})}, **given)

        return join(*options)(cast("F", run))

    return decorate


progress_option = click.option(
    "--progress/--no-progress", default=True, help="Show how far loading, reading and writing are, on a terminal."
)
engine_options = bundle(
    EngineOptions, "engine", model_options, devices_options, method_options(None), weights_option, progress_option
)


def fits(option: str, tokens: int | None, model: str) -> Check:
    """Refuses a model with fewer positions than an option asks for, before its weights are there."""
    from coattn.hf.families import check_length

    return lambda _, most: check_length(option, tokens, model, most)


def load_model(
    options: dict[str, Any], on_host: bool = False, progress: bool = True, check: Check | None = None
) -> Loaded:
    """The model of `model_options`, with a line on stderr that says how far it is."""
    from coattn.hf.load import load

    name, place = options["model"], {"dtype": options["dtype"], "device": options["device"]}
    with progress_line(f"{Path(name).name}: ", progress) as show:
        return load(name, **place, on_host=on_host, on_progress=show, check=check)


def compose_method(options: dict[str, Any]) -> Composed:
    """The row of `method_options`. Raises ConfigError, before a model is loaded, where --method or --set is wrong."""
    from coattn.method.row import compose
    from coattn.method.table import find_method

    return compose(find_method(options["method"]), **parse_settings(options["settings"]))


def is_given(name: str) -> bool:
    """Whether an option of the running command was typed, rather than left at its default."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def parse_devices(devices: str | None, shares: str | None) -> tuple[list[str], list[float] | None] | None:
    """The values of `devices_options`; None: one device."""
    if devices is None:
        if shares is not None:
            raise ConfigError("--device-shares needs --devices.", "Give both, or neither.")
        return None
    names = [name.strip() for name in devices.split(",")]
    if not all(names):
        raise ConfigError(f"--devices {devices!r} has an empty name.", "Write it like --devices cuda:0,cuda:1.")
    try:
        return names, None if shares is None else [float(share) for share in shares.split(",")]
    except ValueError:
        raise ConfigError(
            f"--device-shares {shares!r} is not a list of numbers.", "Write it like --device-shares 3,1."
        ) from None


def parse_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """`("sinks=4", "overlap=true")` -> `{"sinks": 4, "overlap": True}`; values are TOML, bare words are strings."""
    params: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {setting!r} is not NAME=VALUE.", "Write it like --set sinks=4.")
        name = name.strip().replace("-", "_")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        if name in params and params[name] != value:
            raise ConfigError(f"--set gives {name} twice: {params[name]!r} and {value!r}.", "Give one value.")
        params[name] = value
    return params
