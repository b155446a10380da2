"""`coattn serve --role`: who reads prompts, and for whom."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from coattn.cli.options import EngineOptions, Number
from coattn.cli.output import err
from coattn.errors import ConfigError, InputError
from coattn.text import decode, read_bytes

if TYPE_CHECKING:
    from coattn.engine.llm import LLM

F = TypeVar("F", bound=Callable[..., Any])
KEY = "COATTN_TRANSFER_KEY"
"""The environment variable that holds the secret."""


@dataclass(frozen=True)
class RoleOptions:
    """What the options below were given."""

    name: str
    addresses: tuple[str, ...]
    key_file: str | None
    lease: float
    fallback: bool

    @property
    def prefill(self) -> bool:
        return self.name == "prefill"

    def check(self) -> None:
        """Raises ConfigError before a model is loaded."""
        from coattn.transfer.address import Address

        if self.name == "both" and self.addresses:
            raise ConfigError("--prefill-at needs --role.", "Give --role decode or --role prefill.")
        if self.name != "both" and not self.addresses:
            raise ConfigError(
                f"--role {self.name} needs an address.", "Give --prefill-at, such as tcp://127.0.0.1:8100."
            )
        if self.prefill and len(self.addresses) > 1:
            raise ConfigError("--role prefill listens at one address.", "Give --prefill-at once.")
        for each in self.addresses:
            Address.of(each).check_key(self.key)

    @property
    def key(self) -> bytes:
        return read_secret(self.key_file)

    def attach(self, llm: LLM, check: bool) -> None:
        """With --role decode: others read prompts for this engine. check: raises InputError where they do not fit."""
        if self.name == "decode":
            from coattn.transfer.decode import RemotePrefill

            made = RemotePrefill(llm, self.addresses, key=self.key, lease=self.lease, fallback=self.fallback)
            made.attach()
            if check:
                made.check()


def role_options(command: F) -> F:
    """--role, --prefill-at, --transfer-key-file, --lease, --no-fallback."""
    for option in (
        click.option(
            "--no-fallback",
            is_flag=True,
            help="With --role decode: fail a request whose prompt no other process can read.",
        ),
        click.option(
            "--lease",
            default=5.0,
            type=Number(0.2, 600),
            help="Seconds of silence after which the other process counts as gone.",
        ),
        click.option(
            "--transfer-key-file",
            metavar="FILE",
            help=f"Read the secret that both sides share from FILE, or set {KEY}.",
        ),
        click.option(
            "--prefill-at",
            multiple=True,
            metavar="ADDRESS",
            help="Address of the process that reads prompts: tcp://HOST:PORT or shm:///PATH. "
            "May be repeated with --role decode.",
        ),
        click.option(
            "--role",
            default="both",
            type=click.Choice(["both", "prefill", "decode"]),
            help="prefill: read prompts for other processes. decode: have other processes read the prompts.",
        ),
    ):
        command = option(command)
    return command


def run_prefill(role: RoleOptions, engine: EngineOptions, chunk: int | None, drain: float) -> None:
    """Reads prompts for others until SIGTERM or SIGINT; what is being read may take `drain` seconds more."""
    from coattn.transfer.prefill import PrefillServer, exact_row

    if engine.weights_on_gpu is not None:
        raise ConfigError("--role prefill does not support --weights-on-gpu.", "Omit --weights-on-gpu.")
    row = engine.row or "full"  # the prompt is read exactly, whatever the method of the decode side
    exact_row(row, **engine.params)
    budgets: dict[str, Any] = {"gpu_kv": engine.gpu_kv, "host_kv": engine.host_kv, **engine.params}
    if chunk is not None:
        budgets["chunk"] = chunk
    loaded = engine.load()
    server = PrefillServer(loaded, role.addresses[0], key=role.key, method=row, **budgets)

    def stop(*_: object) -> None:
        if server.stopping:
            os._exit(1)
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    err.print(f"ready: {loaded.name} reads prompts at {server.address}", highlight=False, soft_wrap=True, markup=False)
    try:
        server.serve()
    finally:
        server.close(drain)


def read_secret(file: str | None) -> bytes:
    """The secret of a file, or of the environment; empty where there is neither. A file without one is refused."""
    if file is not None:
        return decode(read_bytes(Path(file)), file).strip().encode()
    if KEY in os.environ and not os.environ[KEY].strip():
        raise InputError(f"{KEY} is empty.", "Set it to a key, or unset it.")
    return os.environ.get(KEY, "").strip().encode()
