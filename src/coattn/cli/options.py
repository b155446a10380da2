"""Options that several commands share."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from coattn.cli.output import model_progress
from coattn.errors import ConfigError
from coattn.part import MOST
from coattn.units import parse_bytes

if TYPE_CHECKING:
    from coattn.hf.load import Loaded
    from coattn.method.row import Method

F = TypeVar("F", bound=Callable[..., Any])


WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")


class Count(click.IntRange):
    """A whole number; one that no count can reach is refused like one that is too small."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not WHOLE.fullmatch(value.strip()):
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        found = super().convert(value, param, ctx)
        if found > MOST:
            self.fail(f"{found} is larger than {MOST}.", param, ctx)
        return found


class Number(click.FloatRange):
    """A finite number: click lets nan through every range, and infinity through an open one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{found} is not a finite number.", param, ctx)
        return found


def model_options(command: F) -> F:
    """--model, --dtype, --device."""
    for option in (
        click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
        click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16."),
        click.option(
            "--model", default="smollm2", show_default=True, help="smollm2, a model folder, a GGUF file or a hub name."
        ),
    ):
        command = option(command)
    return command


def devices_options(command: F) -> F:
    """--devices, --device-shares."""
    for option in (
        click.option("--device-shares", metavar="LIST", help="How much of the bytes each device holds, such as 3,1."),
        click.option("--devices", metavar="LIST", help="Layers on several devices, such as cuda:0,cuda:1."),
    ):
        command = option(command)
    return command


def parse_devices(devices: str | None, shares: str | None) -> tuple[list[str], list[float] | None] | None:
    """What `devices_options` were given; None: one device."""
    if devices is None:
        if shares is not None:
            raise ConfigError("--device-shares is given without --devices.", "Give both, or neither.")
        return None
    names = [name.strip() for name in devices.split(",")]
    if not all(names):
        raise ConfigError(f"--devices {devices!r} has a name that is empty.", "Write it like --devices cuda:0,cuda:1.")
    try:
        return names, None if shares is None else [float(share) for share in shares.split(",")]
    except ValueError:
        raise ConfigError(
            f"--device-shares {shares!r} are not numbers.", "Write it like --device-shares 3,1."
        ) from None


CHOSEN = "full where the KV fits in GPU memory or there is none, else auto"


def method_options(default: str | None = "full") -> Callable[[F], F]:
    """--method, --gpu-kv, --host-kv, --set. default: of the method; None: the engine chooses."""

    def decorate(command: F) -> F:
        for option in (
            click.option(
                "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of the method; repeatable."
            ),
            click.option("--host-kv", metavar="SIZE", help='Most KV memory in DRAM, such as "8GiB".'),
            click.option("--gpu-kv", metavar="SIZE", help='Most KV memory in the GPU tier, such as "512MiB".'),
            click.option(
                "--method",
                default=default,
                show_default=CHOSEN if default is None else True,
                help="A name from `coattn methods`, or rows.toml[:name].",
            ),
        ):
            command = option(command)
        return command

    return decorate


def weights_option(command: F) -> F:
    """--weights-on-gpu."""
    return click.option(
        "--weights-on-gpu",
        type=Number(0, 1),
        metavar="SHARE",
        help="Share of the layers' weights that GPU memory holds at a time; the others are brought in from DRAM.",
    )(command)


@dataclass(frozen=True)
class Engine:
    """What `engine_options` were given: a model, and the method it runs under."""

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

    @property
    def memory(self) -> dict[str, Any]:
        """What of the model and its KV may lie where."""
        found = {"gpu_kv": self.gpu_kv, "host_kv": self.host_kv, "weights_on_gpu": self.weights_on_gpu}
        asked = parse_devices(self.devices, self.device_shares)
        return found if asked is None else {**found, "devices": asked[0], "device_shares": asked[1]}

    @cached_property
    def params(self) -> dict[str, Any]:
        """The method's parameters."""
        return parse_settings(self.settings)

    @cached_property
    def row(self) -> Method | None:
        """The method; None: the engine's choice. Raises what is wrong with it, its parameters or the sizes, before a
        model is loaded."""
        from coattn.engine.choose import candidates
        from coattn.method.row import compose
        from coattn.method.table import find_method

        found = None if self.method is None else find_method(self.method)
        if found is None:
            candidates(self.params)
        else:
            compose(found, **self.params)
        asked = parse_devices(self.devices, self.device_shares)
        for name, given in (("--gpu-kv", self.gpu_kv), ("--host-kv", self.host_kv)):
            for size in given.split(",") if given and asked is not None and name == "--gpu-kv" else (given,):
                parse_bytes(size, name)
        if asked is not None:
            from coattn.engine.devices import Devices

            Devices.of(*asked, self.gpu_kv, self.device, self.weights_on_gpu)
        return found

    def load(self) -> Loaded:
        """The model, with a bar on stderr while it is fetched or converted."""
        from coattn.hf.load import load

        with model_progress() as show:
            asked = parse_devices(self.devices, self.device_shares)
            device = self.device if asked is None else asked[0][0].partition(":")[0]
            on_host = self.weights_on_gpu is not None or asked is not None
            return load(self.model, dtype=self.dtype, device=device, on_host=on_host, on_progress=show)


def engine_options(command: F) -> F:
    """The options of a model and of a method, as one argument `engine`."""
    names = [each.name for each in fields(Engine)]

    @wraps(command)
    def run(**given: Any) -> Any:
        return command(engine=Engine(**{name: given.pop(name) for name in names}), **given)

    return model_options(devices_options(method_options(None)(weights_option(cast("F", run)))))


def length_option(what: str) -> Callable[[F], F]:
    """--max-length."""
    return click.option("--max-length", type=Count(2), help=f"Tokens of {what}; by default the model's, at most 8,192.")


def sampling_options(tokens: int, temperature: float, top_p: float | None) -> Callable[[F], F]:
    """--max-new-tokens, --temperature, --top-p, with these defaults."""

    def decorate(command: F) -> F:
        for option in (
            click.option(
                "--top-p",
                default=top_p,
                show_default=top_p is not None,
                type=Number(0, 1, min_open=True),
                help="Sample from the likeliest tokens of this mass.",
            ),
            click.option("--temperature", default=temperature, show_default=True, type=Number(0), help="0 is greedy."),
            click.option("--max-new-tokens", default=tokens, show_default=True, type=Count(1), help="Longest answer."),
        ):
            command = option(command)
        return command

    return decorate


def json_option(command: F) -> F:
    """--json."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else there."
    )(command)


def seconds_option(default: float) -> Callable[[F], F]:
    """--seconds of a benchmark of decode steps."""
    text = "Most time per row, but three steps at least."
    return click.option("--seconds", default=default, show_default=True, type=Number(0), help=text)


def is_given(name: str) -> bool:
    """Whether an option of the running command was typed, rather than left at its default."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def parse_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """`("sinks=4", "overlap=true")` -> `{"sinks": 4, "overlap": True}`; values are TOML, bare words are strings."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {setting!r} is not NAME=VALUE.", "Write it like --set sinks=4.")
        name = name.strip().replace("-", "_")
        made = _value(value)
        if name in found and found[name] != made:
            raise ConfigError(f"--set gives {name} twice: {found[name]!r} and {made!r}.", "Leave one out.")
        found[name] = made
    return found


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
