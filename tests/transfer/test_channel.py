"""Frames between two who share a secret; what is changed, repeated or too long is noticed."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from coattn.transfer.channel import Channel, ChannelError, RefusedError


def quiet(_: int) -> None: ...


def pair(one: bytes = b"k", other: bytes = b"k") -> tuple[Channel | ChannelError, Channel | ChannelError]:
    """The side that was called, and the caller: a channel each, or why not."""
    left, right = socket.socketpair()
    made: dict[bool, Any] = {}

    def make(link: socket.socket, key: bytes, called: bool) -> None:
        try:
            made[called] = Channel(link, key, called, quiet)
        except ChannelError as error:
            made[called] = error

    thread = threading.Thread(target=make, args=(left, one, True))
    thread.start()
    make(right, other, False)
    thread.join(10)
    return made[True], made[False]


def test_frames_and_payloads_arrive() -> None:
    server, client = pair()
    assert isinstance(server, Channel)
    assert isinstance(client, Channel)
    data = os.urandom(3_000_000)  # more than a socket holds
    sending = threading.Thread(target=client.send, args=({"op": "a", "n": 1.5}, quiet, [memoryview(data)]))
    sending.start()
    assert server.receive(quiet) == {"op": "a", "n": 1.5}
    held = bytearray(len(data))
    server.read_into(memoryview(held), quiet)
    sending.join()
    assert held == data
    server.send({"op": "b"}, quiet)
    assert client.receive(quiet) == {"op": "b"}
    client.close()
    with pytest.raises(ChannelError, match="gone"):
        server.receive(quiet)


@pytest.mark.parametrize("keys", [(b"k", b"x"), (b"k", b""), (b"", b"k")])
def test_both_sides_refuse_another_key(keys: tuple[bytes, bytes]) -> None:
    for side in pair(*keys):
        assert isinstance(side, RefusedError)


def frames(change: Callable[[bytearray], object]) -> Channel:
    """Two frames on their way to a server, changed there."""
    server, client = pair()
    assert isinstance(server, Channel)
    assert isinstance(client, Channel)
    client.send({"op": "one"}, quiet)
    client.send({"op": "two"}, quiet)
    held = bytearray(server.link.recv(4096))
    change(held)
    left, right = socket.socketpair()
    left.sendall(held)
    left.close()
    server.link = right
    return server


def swap(held: bytearray) -> None:
    half = len(held) // 2
    held[:] = held[half:] + held[:half]


@pytest.mark.parametrize("place", [4, 20, 40, -1])
def test_a_changed_byte_is_noticed(place: int) -> None:
    def change(held: bytearray) -> None:
        held[place] ^= 1

    server = frames(change)
    if place < 0:
        assert server.receive(quiet) == {"op": "one"}
    with pytest.raises(ChannelError, match="changed"):
        server.receive(quiet)


def test_frames_in_another_order_are_noticed() -> None:
    with pytest.raises(ChannelError, match="changed"):
        frames(swap).receive(quiet)


def test_a_frame_without_end_is_refused() -> None:
    def change(held: bytearray) -> None:
        held[:4] = struct.pack("!I", 1 << 30)

    with pytest.raises(ChannelError, match="too long"):
        frames(change).receive(quiet)


def test_who_speaks_something_else_is_refused() -> None:
    left, right = socket.socketpair()
    right.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
    with pytest.raises(ChannelError, match="another protocol"):
        Channel(left, b"", True, quiet)


def test_a_wait_ends_when_its_tick_says_so() -> None:
    server, _client = pair()
    assert isinstance(server, Channel)

    def tired(_: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        server.receive(tired)
