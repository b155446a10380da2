"""Sequences that wait on disk: what they may push out, who waits for their files, and what is measured of them."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coattn.engine.store import files as files_module
from coattn.engine.store.files import PRIVATE, SUFFIX, FileCache


def tensors(count: int, value: float = 0.0) -> dict[str, Tensor]:
    """So many bytes."""
    return {"x": torch.full((count // 4,), value)}


def key(i: int) -> str:
    return f"{i:064x}{SUFFIX}"


def value(disk: FileCache, name: str | None) -> float | None:
    """The number that a file's tensor is full of; None where it is gone."""
    assert name is not None
    found = disk.load([name]).result().tensors
    return float(found[0]["x"][0]) if found else None


def held_back(disk: FileCache) -> threading.Event:
    """The writer waits until the event is set."""
    stop = threading.Event()
    disk._writer.submit(stop.wait)
    return stop


def file_bytes(tmp_path: Path, count: int) -> int:
    """Bytes of a file of so many bytes of tensors."""
    disk = FileCache(tmp_path / "measured", 1 << 20, {})
    disk.put(key(0), tensors(count))
    disk.flush()
    size = disk.size(key(0))
    disk.close()
    return size


def test_a_sequence_that_is_too_large_deletes_nothing(tmp_path: Path) -> None:
    disk = FileCache(tmp_path, 6 * file_bytes(tmp_path, 400), {})
    for i in range(3):
        disk.put(key(i), tensors(400))
    disk.flush()
    assert disk.put_private(tensors(disk.limit + 4)) is None
    disk.flush()
    assert [key(i) in disk for i in range(3)] == [True] * 3
    # its tensors fit, its file with the digests does not
    assert disk.put_private(tensors(disk.limit)) is None
    assert not disk.put(key(3), tensors(disk.limit))
    disk.flush()
    assert [key(i) in disk for i in range(3)] == [True] * 3
    assert (disk.counts["skipped"], disk.counts["deleted"]) == (3, 0)
    # what just fits pushes out the others
    name = disk.put_private(tensors(disk.limit - 2000))
    disk.flush()
    assert value(disk, name) == 0.0
    assert disk.counts["deleted"] > 0
    assert disk.held <= disk.limit
    disk.close()


def test_the_least_recently_used_goes_first_also_where_it_is_a_sequence(tmp_path: Path) -> None:
    one = file_bytes(tmp_path, 400)
    disk = FileCache(tmp_path, 4 * one + 100, {})
    first = disk.put_private(tensors(400, 1.0))
    disk.flush()
    for i in range(3):
        disk.put(key(i), tensors(400))
        disk.flush()
    assert value(disk, first) is None, "it has made room for blocks that came later"
    assert [key(i) in disk for i in range(3)] == [True] * 3
    second = disk.put_private(tensors(400, 2.0))
    disk.flush()
    assert value(disk, second) == 2.0
    assert [key(i) in disk for i in range(3)] == [False, True, True]
    assert disk.held <= disk.limit
    disk.close()


def test_nobody_waits_for_a_sequence_to_be_written(tmp_path: Path) -> None:
    disk = FileCache(tmp_path, 1 << 20, {})
    go_on = held_back(disk)
    name = disk.put_private(tensors(400, 3.0))
    assert not list(tmp_path.glob(PRIVATE + "*"))
    assert value(disk, name) == 3.0
    go_on.set()
    disk.flush()
    assert (tmp_path / name).exists()
    assert value(disk, name) == 3.0
    disk.delete(name)
    assert not (tmp_path / name).exists()
    disk.close()


def test_what_comes_back_before_it_was_written_is_not_written(tmp_path: Path) -> None:
    disk = FileCache(tmp_path, 1 << 20, {})
    go_on = held_back(disk)
    name = disk.put_private(tensors(400))
    assert name is not None
    disk.delete(name)
    assert value(disk, name) is None
    go_on.set()
    disk.flush()
    assert disk.counts["written"] == 0
    assert not list(tmp_path.glob("*" + SUFFIX))
    disk.close()


def test_what_is_deleted_while_it_is_written_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FileCache(tmp_path, 1 << 20, {})
    began, go_on = threading.Event(), threading.Event()
    write = files_module.sealed.write

    def slowly(*args: object, **more: object) -> None:
        began.set()
        go_on.wait()
        write(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(files_module.sealed, "write", slowly)
    name = disk.put_private(tensors(400))
    assert name is not None
    assert began.wait(10)
    disk.delete(name)
    go_on.set()
    disk.flush()
    assert not list(tmp_path.glob("*" + SUFFIX))
    assert disk.held == 0
    disk.close()


def test_what_waits_to_be_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence of any size, or several up to the bound."""
    monkeypatch.setattr(files_module, "QUEUE_BYTES", 1000)
    disk = FileCache(tmp_path, 1 << 20, {})
    go_on = held_back(disk)
    assert [disk.put_private(tensors(400)) is not None for _ in range(3)] == [True, True, False]
    assert disk.put(key(0), tensors(900)), "blocks have a queue of their own"
    go_on.set()
    disk.flush()
    go_on = held_back(disk)
    assert disk.put_private(tensors(4000)) is not None
    assert disk.put_private(tensors(4)) is None
    go_on.set()
    disk.close()
    assert not list(tmp_path.glob(PRIVATE + "*")), "they are this process's alone"


def test_a_block_out_of_the_queue_is_not_a_read(tmp_path: Path) -> None:
    disk = FileCache(tmp_path, 1 << 20, {})
    go_on = held_back(disk)
    for i in range(4):
        disk.put(key(i), tensors(400))
    found = disk.load([key(i) for i in range(4)]).result()
    assert (len(found.tensors), found.bytes) == (4, 0)
    go_on.set()
    disk.flush()
    found = disk.load([key(i) for i in range(4)]).result()
    assert (len(found.tensors), found.bytes) == (4, disk.held)
    disk.close()
