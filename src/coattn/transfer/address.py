"""Where a process that reads prompts is found, and how the bytes come from there."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from coattn.errors import ConfigError, InputError

HOW = "Give tcp://HOST:PORT or shm:///PATH."
CONNECT = 3.0
"""Seconds until a machine that does not answer is given up."""


class Address(NamedTuple):
    """A host and a port, over whose socket the bytes come; or the path of a Unix socket, beside shared memory."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def shared(self) -> bool:
        """Whether both processes map the memory of a prompt."""
        return bool(self.path)

    @staticmethod
    def of(text: str) -> Address:
        """`tcp://127.0.0.1:8100`, `tcp://[::1]:8100`, `shm:///run/user/1000/coattn.sock`. Raises ConfigError."""
        kind, mark, rest = text.partition("://")
        if not mark or kind not in ("tcp", "shm") or not rest:
            raise ConfigError(f"{text!r} is no address of a process that reads prompts.", HOW)
        if kind == "shm":
            if not rest.startswith("/") or "\0" in rest or len(os.fsencode(rest)) > 107:
                raise ConfigError(f"{text!r} needs a path from / on, of at most 107 bytes.", HOW)
            return Address(path=rest)
        host, _, port = rest.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{text!r} has no host and port.", HOW)
        return Address(host, int(port))

    def __str__(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"shm://{self.path}" if self.shared else f"tcp://{shown}:{self.port}"

    def check_key(self, key: bytes) -> None:
        """Raises ConfigError where others than this machine could listen or ask, and there is no key."""
        if not self.shared and not key and not is_local(self.host):
            raise ConfigError(
                f"Anyone who can reach {self.host} could read prompts or have them read: there is no key.",
                "Give --transfer-key-file or set COATTN_TRANSFER_KEY on both sides.",
            )

    def listen(self) -> socket.socket:
        """A socket that listens. Raises InputError with the reason."""
        try:
            if not self.shared:
                family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
                return socket.create_server((self.host, self.port), family=family, backlog=64)
            self._unlink_dead()
            made = socket.socket(socket.AF_UNIX)
            before = os.umask(0o177)  # the owner alone may connect
            try:
                made.bind(self.path)
                made.listen(64)
            except BaseException:
                made.close()
                raise
            finally:
                os.umask(before)
            return made
        except (OSError, UnicodeError, OverflowError) as error:
            said = getattr(error, "strerror", None) or str(error)
            raise InputError(f"{self} cannot be listened on: {said}.", "Choose another address.") from None

    def connect(self) -> socket.socket:
        """A connection. Raises OSError."""
        if not self.shared:
            made = socket.create_connection((self.host, self.port), CONNECT)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(CONNECT)
            made.connect(self.path)
            if not same_user(made):
                raise PermissionError(1, "another user listens there")
        except BaseException:
            made.close()
            raise
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
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
