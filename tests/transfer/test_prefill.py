"""Whatever goes wrong with one prompt is said to its caller; the model reads the next one."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine.small import llm, prompt
from tests.transfer.local import local

from coattn.errors import TransferError
from coattn.hf.prefilled import Prefilled
from coattn.transfer import job, prefill, transport
from coattn.transfer.address import Address
from coattn.transfer.channel import Channel
from coattn.transfer.decode import RemotePrefill
from coattn.transfer.layout import introduce

LEASE = 5.0
send_parts = job.send_parts


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


def ends(*_: Any) -> None:
    raise SystemExit


def send_all_but_the_last(channel: Any, shared: Any, frame: Any, *more: Any) -> None:
    (broken if frame["op"] == "done" else send_parts)(channel, shared, frame, *more)


def send_half(channel: Any, _: Any, frame: Any, parts: Any, tick: Any) -> None:
    def half() -> Iterator[memoryview]:
        yield transport.raw(parts[0][1])
        raise RuntimeError("broken")

    channel.send(frame, tick, half())


def logits_that_break(*given: Any) -> dict[int, Any]:
    return {len(given[3]): SimpleNamespace(float=broken)}


UNREAD, UNSENT = (
    f"could not read the prompt: {why}: RuntimeError" for why in ("The step failed", "It could not be sent")
)
LOST = "was lost while it read a prompt"
FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "while reading": (prefill, "read_prompt", broken, UNREAD),
    "ending the thread": (prefill, "read_prompt", ends, UNREAD.replace("RuntimeError", "SystemExit")),
    "before reading": (prefill, "Sends", broken, UNREAD),
    "with the logits": (prefill, "read_prompt", logits_that_break, UNREAD),
    "while hashing": (transport, "digest", broken, UNSENT),
    "before a frame": (job, "send_parts", broken, UNSENT),
    "before the last frame": (job, "send_parts", send_all_but_the_last, UNSENT),
    "within a frame": (job, "send_parts", send_half, LOST),
    "with a request": (prefill, "Layout", broken, LOST),
}
"""When: what is put in whose place, and what the caller is told."""


@pytest.mark.parametrize("when", FAULTS)
def test_a_fault_is_said_and_the_next_prompt_is_read(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *place, said = FAULTS[when]
    with (
        local() as server,
        llm() as engine,
        RemotePrefill(engine, str(server.address), lease=LEASE, fallback=False) as remote,
    ):
        assert isinstance(remote.read(prompt(20)), Prefilled)
        monkeypatch.setattr(*place)
        begun = time.monotonic()
        with pytest.raises(TransferError, match=said):
            remote.read(prompt(200), timeout=4 * LEASE)
        assert time.monotonic() - begun < LEASE, "said, and not found out by silence"
        monkeypatch.undo()
        if "lost" in said:
            remote._links[0].asleep = 0.0
        assert isinstance(remote.read(prompt(200), timeout=4 * LEASE), Prefilled)
    assert not server._active, "nobody is waited for"


def test_a_caller_that_sends_no_descriptor_is_given_up(tmp_path: Path) -> None:
    lease = 0.5
    with local(f"shm://{tmp_path / 'socket'}") as server, llm() as engine:
        channel = Channel(Address.of(str(server.address)).connect(), b"", called=False, tick=lambda _: None)
        layers = engine.runner.runtime.layers
        channel.send(introduce(engine.fingerprints(), layers, engine.vocabulary), lambda _: None)
        assert channel.receive(lambda _: None)["op"] == "opened"
        channel.send({"op": "read", "tokens": 20, "lease": lease}, lambda _: None)
        end = time.monotonic() + 10 * lease
        while server._callers and time.monotonic() < end:
            time.sleep(0.01)
        assert not server._callers, "its lease is over"
        channel.close()


def test_a_process_without_free_descriptors_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    with local() as server, llm() as engine:
        real = server._socket

        def accept() -> Any:
            now = time.monotonic()
            if not tried or now - tried[0] < 0.6:
                tried.append(now)
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

        monkeypatch.setattr(server, "_socket", SimpleNamespace(accept=accept, close=real.close))
        while not tried:  # a call that waits for the real one
            time.sleep(0.01)
        with RemotePrefill(engine, str(server.address), fallback=False) as remote:
            assert isinstance(remote.read(prompt(20)), Prefilled)
    assert 2 <= len(tried) <= 15
