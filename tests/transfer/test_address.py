"""Addresses, and sockets that killed processes have left."""

import stat
from pathlib import Path

import pytest

from coattn.errors import ConfigError, InputError
from coattn.transfer.address import Address


@pytest.mark.parametrize(
    "text", ["tcp://127.0.0.1:8100", "tcp://[::1]:1", "tcp://machine.example:65535", "shm:///run/user/1/coattn.sock"]
)
def test_an_address_is_what_was_typed(text: str) -> None:
    assert str(Address.of(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1:8100", "http://127.0.0.1:8100", "tcp://127.0.0.1", "tcp://:1", "tcp://a:65536", "tcp://a:x",
     "tcp://a:\u0664", "shm://socket", "nixl://a:1", f"shm:///{'x' * 120}"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Address.of(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "machine.example", "10.0.0.1"])
def test_elsewhere_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="there is no key"):
        Address.of(f"tcp://{host}:1").check_key(b"")
    Address.of(f"tcp://{host}:1").check_key(b"secret")
    Address.of("tcp://127.0.0.1:1").check_key(b"")


def test_a_socket_is_for_its_owner_and_replaces_one_that_nobody_listens_on(tmp_path: Path) -> None:
    address = Address.of(f"shm://{tmp_path / 'socket'}")
    first = address.listen()
    assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) == 0o600
    with pytest.raises(InputError, match="cannot be listened on"):
        address.listen()
    first.close()  # as a kill leaves it: the name is still there
    with address.listen():
        address.connect().close()


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(InputError, match="there already"):
        Address.of(f"shm://{tmp_path / 'notes'}").listen()
    assert (tmp_path / "notes").read_text() == "mine"
