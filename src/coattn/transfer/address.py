"""Where a process that reads prompts is found, and how the bytes come from there."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from coattn.errors import ConfigError, InputError

KINDS = ("tcp", "shm", "nixl")
HOW = "Give tcp://HOST:PORT, nixl://HOST:PORT or shm:///PATH."
CONNECT = 3.0
"""Seconds until a machine that does not answer is given up."""


@dataclass(frozen=True)
class Address:
    """kind: how the bytes come. Control messages go over TCP, or over a Unix socket for `shm`."""

    kind: str
    host: str = ""
    port: int = 0
    path: str = ""

    @staticmethod
    def of(text: str) -> Address:
        """`tcp://127.0.0.1:8100`, `nixl://[::1]:8100`, `shm:///run/user/1000/coattn.sock`. Raises ConfigError."""
        kind, mark, rest = text.partition("://")
        if not mark or kind not in KINDS or not rest:
            raise ConfigError(f"{text!r} is no address of a process that reads prompts.", HOW)
        if kind == "shm":
            if not rest.startswith("/") or "\0" in rest or len(os.fsencode(rest)) > 107:
                raise ConfigError(f"{text!r} needs a path from / on, of at most 107 bytes.", HOW)
            return Address(kind, path=rest)
        host, _, port = rest.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{text!r} has no host and port.", HOW)
        return Address(kind, host, int(port))

    def __str__(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"shm://{self.path}" if self.kind == "shm" else f"{self.kind}://{shown}:{self.port}"

    def check_key(self, key: bytes) -> None:
        """Raises ConfigError where others than this machine could listen or ask, and there is no key."""
        if self.kind != "shm" and not key and not is_local(self.host):
            raise ConfigError(
                f"Anyone who can reach {self.host} could read prompts or have them read: there is no key.",
                "Give --transfer-key-file or set COATTN_TRANSFER_KEY on both sides.",
            )

    def listen(self) -> socket.socket:
        """A socket that listens. Raises InputError with the reason."""
        try:
            if self.kind != "shm":
                family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
                return socket.create_server((self.host, self.port), family=family, backlog=64)
            self._unlink_dead()
            made = socket.socket(socket.AF_UNIX)
            with contextlib.ExitStack() as undo:
                undo.callback(made.close)
                before = os.umask(0o177)  # the owner alone may connect
                try:
                    made.bind(self.path)
                finally:
                    os.umask(before)
                made.listen(64)
                undo.pop_all()
            return made
        except (OSError, UnicodeError, OverflowError) as error:
            said = getattr(error, "strerror", None) or str(error)
            raise InputError(f"{self} cannot be listened on: {said}.", "Choose another address.") from None

    def connect(self) -> socket.socket:
        """A connection. Raises OSError."""
        if self.kind != "shm":
            made = socket.create_connection((self.host, self.port), CONNECT)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            made = socket.socket(socket.AF_UNIX)
            try:
                made.settimeout(CONNECT)
                made.connect(self.path)
                if not same_user(made):
                    raise PermissionError(1, "another user listens there")
            except BaseException:
                made.close()
                raise
        made.settimeout(None)
        return made

    def _unlink_dead(self) -> None:
        """Removes a socket that a process which was killed has left."""
        path = Path(self.path)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise FileExistsError(17, "a file of that name is there already")
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT)
                try:
                    probe.connect(self.path)
                except ConnectionRefusedError:
                    path.unlink()


def same_user(link: socket.socket) -> bool:
    """Whether the other end of a Unix socket is of the user that runs this process."""
    found = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1]) == os.getuid()


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
