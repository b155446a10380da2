"""Whatever goes wrong with one prompt is said to its caller; the model reads the next one."""

import errno
import time
from collections.abc import Callable, Iterator
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
Patch = pytest.MonkeyPatch


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


def while_reading(patch: Patch) -> None:
    patch.setattr(prefill, "read_prompt", broken)


def ending_the_thread(patch: Patch) -> None:
    def end(*_: Any) -> None:
        raise SystemExit

    patch.setattr(prefill, "read_prompt", end)


def before_reading(patch: Patch) -> None:
    patch.setattr(prefill, "Sends", broken)


def with_the_logits(patch: Patch) -> None:
    patch.setattr(prefill, "read_prompt", lambda *given: {len(given[3]): SimpleNamespace(float=broken)})


def while_hashing(patch: Patch) -> None:
    patch.setattr(transport, "digest", broken)


def before_a_frame(patch: Patch) -> None:
    patch.setattr(job, "send_parts", broken)


def before_the_last_frame(patch: Patch) -> None:
    real = job.send_parts

    def send(channel: Any, shared: Any, frame: Any, *more: Any) -> None:
        (broken if frame["op"] == "done" else real)(channel, shared, frame, *more)

    patch.setattr(job, "send_parts", send)


def within_a_frame(patch: Patch) -> None:
    def half(parts: Any) -> Iterator[memoryview]:
        yield transport.raw(parts[0][1])
        raise RuntimeError("broken")

    patch.setattr(job, "send_parts", lambda channel, _, frame, parts, tick: channel.send(frame, tick, half(parts)))


def with_a_request(patch: Patch) -> None:
    patch.setattr(prefill, "Layout", broken)


FAULTS: list[tuple[Callable[[Patch], None], str]] = [
    (while_reading, "could not read the prompt: The step failed: RuntimeError"),
    (ending_the_thread, "could not read the prompt: The step failed: SystemExit"),
    (before_reading, "could not read the prompt: The step failed: RuntimeError"),
    (with_the_logits, "could not read the prompt: The step failed: RuntimeError"),
    (while_hashing, "could not read the prompt: It could not be sent: RuntimeError"),
    (before_a_frame, "could not read the prompt: It could not be sent: RuntimeError"),
    (before_the_last_frame, "could not read the prompt: It could not be sent: RuntimeError"),
    (within_a_frame, "was lost while it read a prompt"),
    (with_a_request, "was lost while it read a prompt"),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_said_and_the_next_prompt_is_read(
    fault: Callable[[Patch], None], said: str, monkeypatch: Patch
) -> None:
    with (
        local() as server,
        llm() as engine,
        RemotePrefill(engine, str(server.address), lease=LEASE, fallback=False) as remote,
    ):
        assert isinstance(remote.read(prompt(20)), Prefilled)
        fault(monkeypatch)
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


def test_a_process_without_free_descriptors_waits(monkeypatch: Patch) -> None:
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
