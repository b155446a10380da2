"""Frames between two who share a secret; what is changed, repeated or too long is noticed."""

import contextlib
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


def channels() -> tuple[Channel, Channel]:
    server, client = pair()
    assert isinstance(server, Channel)
    assert isinstance(client, Channel)
    return server, client


def test_frames_and_payloads_arrive() -> None:
    server, client = channels()
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
    server, client = channels()
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
    server, _client = channels()

    def tired(_: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        server.receive(tired)


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_wait_for_a_descriptor_ends_when_its_tick_says_so(way: str) -> None:
    server, client = channels()
    tick = in_time(0.2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(fill, client, tick) if way == "out" else threads.submit(server.receive_fd, tick)
        try:
            with pytest.raises(TimeoutError, match="too late"):
                waiting.result(3)
        finally:
            server.shutdown()  # else a thread that waits in the system would wait for ever


def in_time(seconds: float) -> Callable[[int], None]:
    end = time.monotonic() + seconds

    def tick(_: int) -> None:
        if time.monotonic() > end:
            raise TimeoutError("too late")

    return tick


def fill(channel: Channel, tick: Callable[[int], None]) -> None:
    """Sends a descriptor where there is no more room for one."""
    channel._write = lambda *_: None  # type: ignore[method-assign]
    with contextlib.suppress(TimeoutError):
        while True:
            channel.link.send(bytes(1 << 16))
    channel.send({"op": "a"}, tick, fd=0)


def test_descriptors_arrive() -> None:
    server, client = channels()
    with tempfile.TemporaryFile() as file:
        client.send({"op": "a"}, quiet, [memoryview(b"rest")], file.fileno())
        assert server.receive(quiet) == {"op": "a"}
        found = server.receive_fd(quiet)
        assert os.path.sameopenfile(found, file.fileno())
        os.close(found)
    client.send({"op": "b"}, quiet, [memoryview(b"none")])
    held = bytearray(4)
    server.read_into(memoryview(held), quiet)
    assert held == b"rest"
    assert server.receive(quiet) == {"op": "b"}
    with pytest.raises(ChannelError, match="no descriptor"):
        server.receive_fd(quiet)


def test_half_a_frame_ends_the_connection() -> None:
    server, client = channels()

    def half() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        client.send({"op": "a"}, quiet, half())
    with pytest.raises(ChannelError):
        client.send({"op": "b"}, quiet)
    assert server.receive(quiet) == {"op": "a"}
    with pytest.raises(ChannelError, match="gone"):
        server.read_into(memoryview(bytearray(8)), quiet)
