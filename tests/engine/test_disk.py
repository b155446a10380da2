"""Blocks that memory has no room for: on disk and back, the same answers, and nothing damaged is believed."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.rows import options
from tests.engine.small import UNIT, flush, greedy, in_order, prompt, slow_prompts, small, tokenizer

import coattn
from coattn.engine.store import files as files_module
from coattn.engine.store.files import SUFFIX, FileCache
from coattn.engine.store.keys import extend_keys
from coattn.engine.store.speed import DiskSpeed, PromptSpeed
from coattn.errors import ConfigError

PARAMS = greedy(4, ignore_eos=True)
TEXT = prompt(96, seed=1)
BUDGETS = {
    "full": {"gpu_kv": 14 * UNIT},
    "cpu": {"host_kv": 14 * UNIT},
    "scout": {"host_kv": 14 * UNIT},
    "hgca": {"host_kv": 44 * UNIT},
}


def engine(method: str, folder: Path | None, **more: Any) -> coattn.LLM:
    given = {"max_batch": 2, "max_length": 112, "chunk": 24, **options(method), **BUDGETS.get(method, {}), **more}
    llm = coattn.LLM((small(1), tokenizer()), method, disk=folder, **given)
    slow_prompts(llm)
    return llm


@contextmanager
def pushed_out(folder: Path, **more: Any) -> Iterator[tuple[coattn.LLM, tuple[int, ...]]]:
    """An engine that has answered `TEXT`, which has left its memory since; and the answer."""
    with engine("cpu", folder, **more) as llm:
        (found,) = llm.generate(TEXT, PARAMS)
        push_out(llm)
        yield llm, found.token_ids


def push_out(llm: coattn.LLM, seed: int = 50) -> None:
    """Other prompts take the room of what was stored."""
    for i in range(3):
        llm.generate(prompt(90, seed=seed + i), PARAMS)
    flush(llm)


@pytest.mark.parametrize("method", BUDGETS)
def test_what_was_pushed_out_comes_back(method: str, tmp_path: Path) -> None:
    text = TEXT
    asked = [text, text[:81] + prompt(9, seed=2), text[:40] + prompt(50, seed=3)]
    with engine(method, None) as llm:
        want = [llm.submit(ids, PARAMS, salt=bytes(i)).result().token_ids for i, ids in enumerate(asked)]
        assert llm.report()["disk"] is None
    with engine(method, tmp_path) as llm:
        llm.generate(text, PARAMS)
        for ids, answer in zip(asked, want, strict=True):
            push_out(llm)
            read, before = llm.report()["prefill_tokens"], llm.report()["disk"]["read_tokens"]
            found = llm.generate(ids, PARAMS)[0]
            common = 96 if ids is text else 81 if ids[40:41] == text[40:41] else 40
            shared = min(common, len(ids) - llm.store.sharing.tail) // 8 * 8
            assert (found.token_ids, found.cached_tokens) == (answer, shared)
            assert llm.report()["prefill_tokens"] - read == len(ids) - shared
            assert llm.report()["disk"]["read_tokens"] > before
            in_order(llm)
    # another process finds what this one has written
    with engine(method, tmp_path) as llm:
        found = llm.generate(asked[1], PARAMS)[0]
        assert found.token_ids == want[1]
        assert found.cached_tokens > 0
        assert llm.report()["disk"]["read_tokens"] == found.cached_tokens
        in_order(llm)


def test_a_request_that_reads_the_disk_leaves_steps_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pushed_out(tmp_path, host_kv=26 * UNIT) as (llm, want):
        push_out(llm, 60)
        read = FileCache._get

        def slowly(self: FileCache, name: str) -> Any:
            time.sleep(0.2)
            return read(self, name)

        monkeypatch.setattr(FileCache, "_get", slowly)
        other = llm.submit(prompt(20, seed=3), greedy(12, ignore_eos=True))
        while other.request.first is None:
            llm.step()
        back = llm.submit(TEXT, PARAMS)
        while not other.done:
            llm.step()
        assert not back.request.output, "the other one went on while files were read"
        found = back.result()
        assert (found.token_ids, found.cached_tokens) == (want, 88)
        in_order(llm)


def test_tenants_do_not_meet_on_disk(tmp_path: Path) -> None:
    with engine("full", tmp_path) as llm:
        llm.submit(TEXT, PARAMS, salt=b"a").result()
        push_out(llm)
        assert llm.submit(TEXT, PARAMS, salt=b"b").result().cached_tokens == 0
        push_out(llm)
        assert llm.submit(TEXT, PARAMS, salt=b"a").result().cached_tokens == 88


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], tuple[int, ...]]:
    """The files of a text's blocks, and its answer."""
    folder = tmp_path_factory.mktemp("disk")
    with pushed_out(folder) as (llm, answer):
        mine = llm.store.sharing.root(b"")
        keys: list[bytes] = []
        extend_keys(keys, mine, TEXT, 8)
    return {name: (folder / name).read_bytes() for name in (key.hex() + SUFFIX for key in keys[:11])}, answer


REGIONS = ("length", "header", "facts", "digests", "seal", "first tensor", "last byte")


@pytest.mark.parametrize("what", [*REGIONS, "short", "empty", "long", "another's", "a folder"])
def test_whatever_is_damaged_is_a_miss(
    what: str, filled: tuple[dict[str, bytes], tuple[int, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, answer = filled
    names = list(files)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    bad, data = tmp_path / names[4], bytearray(files[names[4]])
    header = int.from_bytes(data[:8], "little")
    places = {
        "length": 0,
        "header": 9,
        "facts": data.index(b"made for"),
        "digests": data.index(b'"digests"') + 30,
        "seal": data.index(b'"seal":"') + 20,
        "first tensor": 8 + header,
        "last byte": len(data) - 1,
    }
    if what in places:
        data[places[what]] ^= 1
    changed = {"short": data[:-5], "empty": b"", "long": data + b"x", "another's": files[names[5]]}
    if what == "a folder":
        bad.unlink()
        bad.mkdir()
    else:
        bad.write_bytes(bytes(changed.get(what, data)))
    with engine("cpu", tmp_path) as llm, caplog.at_level(logging.WARNING, "coattn"):
        llm.generate(prompt(3, seed=9), PARAMS)
        found = llm.generate(TEXT, PARAMS)[0]
        assert found.token_ids == answer
        assert found.cached_tokens == 88 - 24, "but for the bad one, with which a chunk was computed"
        assert llm.report()["disk"]["damaged"] == 1
        assert sum("is damaged" in line for line in caplog.messages) == 1
        in_order(llm)
        if what != "a folder":
            push_out(llm)
            assert llm.generate(TEXT, PARAMS)[0].cached_tokens == 88, "it was written anew"


def test_another_models_blocks_are_not_found(tmp_path: Path) -> None:
    with pushed_out(tmp_path):
        pass
    given: dict[str, Any] = {"max_batch": 2, "max_length": 112, "chunk": 24, **options("cpu"), **BUDGETS["cpu"]}
    with coattn.LLM((small(1, seed=5), tokenizer()), "cpu", disk=tmp_path, **given) as llm:
        slow_prompts(llm)
        llm.generate(prompt(3, seed=9), PARAMS)
        assert llm.generate(TEXT, PARAMS)[0].cached_tokens == 0
        assert llm.report()["disk"]["damaged"] == 0


def test_what_is_computed_sooner_is_computed(tmp_path: Path) -> None:
    with pushed_out(tmp_path) as (llm, _):
        disk = llm.store.disk
        disk.reads.note(1, 1e6)  # a disk as slow as no disk is
        found = llm.generate(TEXT, PARAMS)[0]
        assert found.cached_tokens == 0
        assert llm.report()["disk"]["refused_tokens"] == 88
        disk.files.flush()
        assert disk._probe is not None, "and the disk is measured again"
        disk._probe.result()
        disk._finish_probe()
        assert disk.reads.bytes_per_s() > 1e-6


def test_before_anything_was_measured_blocks_are_read(tmp_path: Path) -> None:
    with pushed_out(tmp_path):
        pass
    with engine("cpu", tmp_path) as llm:
        found = llm.generate(TEXT, PARAMS)[0]
        assert found.cached_tokens == 88
        assert llm.report()["prefill_tokens"] == 96 - 88


def test_the_limit_holds_and_ends_of_texts_go_first(tmp_path: Path) -> None:
    with pushed_out(tmp_path):
        one = max(path.stat().st_size for path in tmp_path.glob("*" + SUFFIX))
    for path in tmp_path.iterdir():
        path.unlink()
    with engine("cpu", tmp_path, disk_memory=8 * one) as llm:
        llm.generate(TEXT, PARAMS)
        for i in range(3):
            llm.generate(prompt(9, seed=100 + i), PARAMS)
            while llm.step():
                pass
            flush(llm)
        report = llm.report()["disk"]
        assert sum(path.stat().st_size for path in tmp_path.glob("*" + SUFFIX)) == report["bytes"] <= 8 * one
        assert report["deleted"] > 0
        keys: list[bytes] = []
        extend_keys(keys, llm.store.sharing.root(b""), TEXT, 8)
        left = [(tmp_path / (key.hex() + SUFFIX)).exists() for key in keys]
        assert left == sorted(left, reverse=True), "what is left of a text is its beginning"
        assert 3 <= sum(left) <= 5


def test_a_full_queue_loses_blocks_and_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "QUEUE_BYTES", 0)
    with pushed_out(tmp_path) as (llm, want):
        assert llm.report()["disk"]["skipped"] > 5
        found = llm.generate(TEXT, PARAMS)[0]
        assert (found.token_ids, found.cached_tokens) == (want, 0)


def test_a_full_queue_keeps_the_beginnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks leave memory from the end of a text, and are of no use without those before them."""
    blocks = [{"x": torch.full((1, 4), float(i))} for i in range(8)]
    monkeypatch.setattr(files_module, "QUEUE_BYTES", 3 * blocks[0]["x"].nbytes)
    one = FileCache(tmp_path, 1 << 20, {"model": "m"})
    keys, stop = [f"{i}{SUFFIX}" for i in range(8)], threading.Event()
    one._writer.submit(stop.wait)
    put = [one.put(keys[i], blocks[i], i) for i in (7, 6, 5, 4, 3, 2, 1, 0, 6)]
    assert put == [True] * 8 + [False]
    assert [key in one for key in keys] == [True] * 3 + [False] * 5
    stop.set()
    one.flush()
    assert (one.counts["written"], one.counts["skipped"]) == (3, 6)
    assert [int(each["x"][0, 0]) for each in one.load(keys[:3]).result().tensors] == [0, 1, 2]
    one.close()


def test_a_disk_that_is_full_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module.sealed, "write", full)
    with pushed_out(tmp_path) as (llm, want):
        found = llm.generate(TEXT, PARAMS)[0]
        assert found.token_ids == want
        assert llm.report()["disk"]["written"] == 0


def test_one_folder_one_engine(tmp_path: Path) -> None:
    with engine("cpu", tmp_path), pytest.raises(ConfigError, match="belongs to another engine"):
        engine("cpu", tmp_path)
    with engine("cpu", tmp_path):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used"):
        engine("cpu", tmp_path / "file")
    with pytest.raises(ConfigError, match="no folder"):
        engine("cpu", None, disk_memory="1GiB")


def test_a_queue_is_written_before_it_is_closed_and_read_from_until_then(tmp_path: Path) -> None:
    blocks = [{"x": torch.full((1, 4), float(i))} for i in range(5)]
    keys = [f"{i}{SUFFIX}" for i in range(5)]
    one = FileCache(tmp_path, 1 << 20, {"model": "m"})
    for key, block in zip(keys, blocks, strict=True):
        assert one.put(key, block)
    found = one.load([*keys, "nobody's"]).result()
    assert [int(each["x"][0, 0]) for each in found.tensors] == list(range(5))
    one.close()
    for made_for, count in (({"model": "m"}, 5), ({"model": "other"}, 0)):
        two = FileCache(tmp_path, 1 << 20, made_for)
        assert len(two.load(keys).result().tensors) == count
        two.close()


def test_speeds_follow_what_was_measured() -> None:
    speed = PromptSpeed()
    assert not speed.known
    for start in range(0, 8000, 1000):
        speed.note([(start, start + 1000)], 1000 * (1e-3 + 1e-6 * (start + 500)), waited=True)
    assert speed.seconds(0, 1000) == pytest.approx(1000 * (1e-3 + 0.5e-3), rel=1e-6)
    assert speed.seconds(9000, 10000) == pytest.approx(1000 * (1e-3 + 9.5e-3), rel=1e-6)
    late = PromptSpeed()
    late.note([(0, 100)], 1.0, waited=False)  # the device goes on
    assert not late.known
    late.note([], 1.0, waited=True)
    assert late.seconds(0, 100) == pytest.approx(2.0)
    reads = DiskSpeed()
    reads.note(0, 5.0)
    assert not reads.known
    reads.note(1000, 2.0)
    assert reads.seconds(500) == pytest.approx(1.0)
