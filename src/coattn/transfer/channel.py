"""Frames over a socket between two processes that share a secret.

    both ways, first      MAGIC 8 | nonce 16          the side that was called speaks first
    caller, then called   proof 32                    HMAC-SHA256 of the secret over who speaks and both nonces
    then frames           length 4 | mark 32 | JSON   mark: HMAC over direction, number and JSON, keyed as the proofs
                          payload                     raw; its length follows from the JSON

The secret never crosses the socket. A changed, repeated or reordered frame is noticed. The JSON holds the
SHA-256 of the payload, which the receiver compares. Nothing is encrypted.
"""

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

MAGIC = b"coattn1\n"
NONCE, MARK = 16, 32
MAX_FRAME_BYTES = 1 << 20
"""Most bytes of a frame's JSON."""
HASH_CHUNK_BYTES = 1 << 20
"""Bytes that are hashed in one go."""
TICK_S = 0.05
"""Seconds between two looks at leases and deadlines while a socket has nothing."""

Frame = dict[str, Any]
Tick = Callable[[int], None]
"""Called with the bytes that just came, 0 when none did; raises to give up."""


class ChannelError(Exception):
    """The other side is gone, or what it says is not what it may say."""


class RefusedError(ChannelError):
    """The other side has another secret."""


class GoneError(Exception):
    """Nobody waits for this prompt any more."""


class Channel:
    """One thread receives and one thread sends at a time."""

    def __init__(self, link: socket.socket, key: bytes, called: bool, tick: Tick) -> None:
        """called: whether this side was called. Raises ChannelError; closes the socket then."""
        self.link = link
        link.settimeout(TICK_S)
        self._sent = self._received = 0
        try:
            self._session = self._greet(key, called, tick)
        except BaseException:
            link.close()
            raise
        self._names = (b"called", b"caller") if called else (b"caller", b"called")

    def send(self, frame: Frame, tick: Tick, payload: Iterable[memoryview] = (), fd: int | None = None) -> None:
        """fd: a file that the receiver gets a descriptor of; Unix sockets only. Raises ChannelError.

        A frame that is not sent whole, for whatever reason, ends the connection.
        """
        text = json.dumps(frame).encode()
        mark = self._mark(self._names[0], self._sent, text)
        self._sent += 1
        try:
            self._write(memoryview(struct.pack("!I", len(text)) + mark + text), tick)
            if fd is not None:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
                self._soon(tick, lambda: self.link.sendmsg([b"F"], rights))
            for part in payload:
                self._write(part, tick)
        except BaseException:
            self.shutdown()  # whatever followed half a frame would be taken for the rest of it
            raise

    def receive(self, tick: Tick) -> Frame:
        """The next frame, without its payload. Raises ChannelError."""
        head = self._read(4 + MARK, tick)
        (length,) = struct.unpack_from("!I", head)
        if length > MAX_FRAME_BYTES:
            raise ChannelError("a frame is too long")
        text = self._read(length, tick)
        if not hmac.compare_digest(head[4:], self._mark(self._names[1], self._received, text)):
            raise ChannelError("a frame was changed on its way")
        self._received += 1
        try:
            frame = json.loads(text)
        except (ValueError, RecursionError):
            raise ChannelError("a frame is not JSON") from None
        if not isinstance(frame, dict) or not isinstance(frame.get("op"), str):
            raise ChannelError("a frame says nothing")
        return frame

    def receive_fd(self, tick: Tick) -> int:
        """The descriptor that was sent with the last frame."""
        size = socket.CMSG_LEN(struct.calcsize("i"))
        rights = self._soon(tick, lambda: self.link.recvmsg(1, size))[1]
        if [(level, kind) for level, kind, _ in rights] != [(socket.SOL_SOCKET, socket.SCM_RIGHTS)]:
            raise ChannelError("there is no descriptor")
        (fd,) = struct.unpack("i", rights[0][2])
        return int(fd)

    def read_into(self, view: memoryview, tick: Tick) -> None:
        """A part of a payload, straight to where it belongs. Raises ChannelError."""
        while view:
            count = self._soon(tick, partial(self.link.recv_into, view))
            if not count:
                raise ChannelError("the other side is gone")
            view = view[count:]
            tick(count)

    def shutdown(self) -> None:
        """Wakes the threads that wait on the socket, on both sides. May be called from any thread."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only when no other thread uses it."""
        self.shutdown()
        self.link.close()

    def _greet(self, key: bytes, called: bool, tick: Tick) -> bytes:
        own = os.urandom(NONCE)
        if called:
            self._write(memoryview(MAGIC + own), tick)
        if self._read(len(MAGIC), tick) != MAGIC:
            raise ChannelError("it speaks another protocol")
        other = self._read(NONCE, tick)
        if not called:
            self._write(memoryview(MAGIC + own), tick)
        nonces = own + other if called else other + own

        def proof(who: bytes) -> bytes:
            return hmac.digest(key, who + nonces, "sha256")

        if called:
            if not hmac.compare_digest(self._read(MARK, tick), proof(b"caller")):
                self._write(memoryview(bytes(MARK)), tick)  # a refusal, and no lost connection
                raise RefusedError("it has another key")
            self._write(memoryview(proof(b"called")), tick)
        else:
            self._write(memoryview(proof(b"caller")), tick)
            if not hmac.compare_digest(self._read(MARK, tick), proof(b"called")):
                raise RefusedError("it has another key")
        return proof(b"frames")

    def _mark(self, who: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._session, who + struct.pack("!Q", number) + text, "sha256")

    def _read(self, count: int, tick: Tick) -> bytes:
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), tick)
        return bytes(buffer)

    def _write(self, view: memoryview, tick: Tick) -> None:
        while view:
            view = view[self._soon(tick, partial(self.link.send, view)) :]  # says nothing of who receives: no tick

    def _soon(self, tick: Tick, call: Callable[[], Any]) -> Any:
        """What a call returns once the socket is ready for it; `tick` is asked until then."""
        while True:
            try:
                return call()
            except TimeoutError:
                tick(0)
            except (OSError, ValueError) as error:  # the other side is gone, or this one was closed
                said = getattr(error, "strerror", None) or str(error)
                raise ChannelError(f"the connection is lost ({said})") from None


def digest(parts: Iterable[memoryview]) -> str:
    """SHA-256 over the SHA-256 of each piece of each part: pieces are hashed side by side."""
    pieces = [part[at : at + HASH_CHUNK_BYTES] for part in parts for at in range(0, len(part), HASH_CHUNK_BYTES)]
    hashes = _hashers().map(lambda piece: hashlib.sha256(piece).digest(), pieces)
    return hashlib.sha256(b"".join(hashes)).hexdigest()


@cache
def _hashers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "coattn-hash")
