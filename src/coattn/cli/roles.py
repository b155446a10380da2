"""`coattn serve --role`: who reads prompts, and for whom."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coattn.cli.options import EngineOptions, Number, bundle
from coattn.cli.output import tell
from coattn.errors import ConfigError, InputError
from coattn.text import decode, read_bytes

if TYPE_CHECKING:
    from coattn.engine.llm import LLM

KEY = "COATTN_TRANSFER_KEY"
"""The environment variable that holds the secret."""


@dataclass(frozen=True)
class RoleOptions:
    """The values of `role_options`."""

    role: str
    prefill_at: tuple[str, ...]
    transfer_key_file: str | None
    lease: float
    no_fallback: bool

    def check(self) -> None:
        """Raises ConfigError before a model is loaded."""
        from coattn.transfer.address import Address

        if self.role == "both" and self.prefill_at:
            raise ConfigError("--prefill-at needs --role.", "Give --role decode or --role prefill.")
        if self.role != "both" and not self.prefill_at:
            raise ConfigError(
                f"--role {self.role} needs an address.", "Give --prefill-at, such as tcp://127.0.0.1:8100."
            )
        if self.role == "prefill" and len(self.prefill_at) > 1:
            raise ConfigError("--role prefill listens at one address.", "Give --prefill-at once.")
        for each in self.prefill_at:
            Address.of(each).check_key(self.key)

    @property
    def key(self) -> bytes:
        """The secret of the file or of the environment; empty where there is neither. An empty one is refused."""
        file = self.transfer_key_file
        if file is not None:
            return decode(read_bytes(Path(file)), file).strip().encode()
        if KEY in os.environ and not os.environ[KEY].strip():
            raise InputError(f"{KEY} is empty.", "Set it to a key, or unset it.")
        return os.environ.get(KEY, "").strip().encode()

    def attach(self, llm: LLM, check: bool) -> None:
        """With --role decode: others read prompts for this engine. check: raises InputError where they do not fit."""
        if self.role == "decode":
            from coattn.transfer.decode import RemotePrefill

            remote = RemotePrefill(llm, self.prefill_at, key=self.key, lease=self.lease, fallback=not self.no_fallback)
            remote.attach()
            if check:
                remote.check()


role_options = bundle(
    RoleOptions,
    "part",
    click.option(
        "--role",
        default="both",
        type=click.Choice(["both", "prefill", "decode"]),
        help="prefill: read prompts for other processes. decode: have other processes read the prompts.",
    ),
    click.option(
        "--prefill-at",
        multiple=True,
        metavar="ADDRESS",
        help="Address of the process that reads prompts: tcp://HOST:PORT or shm:///PATH. "
        "May be repeated with --role decode.",
    ),
    click.option(
        "--transfer-key-file",
        metavar="FILE",
        help=f"Read the secret that both sides share from FILE, or set {KEY}.",
    ),
    click.option(
        "--lease",
        default=5.0,
        type=Number(0.2, 600),
        help="Seconds of silence after which the other process counts as gone.",
    ),
    click.option(
        "--no-fallback",
        is_flag=True,
        help="With --role decode: fail a request whose prompt no other process can read.",
    ),
)


def run_prefill(part: RoleOptions, engine: EngineOptions, chunk: int | None, drain: float) -> None:
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
    server = PrefillServer(loaded, part.prefill_at[0], key=part.key, method=row, **budgets)

    def stop(*_: object) -> None:
        if server.stopping:
            os._exit(1)
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    tell(f"ready: {loaded.name} reads prompts at {server.address}")
    try:
        server.serve()
    finally:
        server.close(drain)
