"""An engine that was killed: another one on its folder finds what it had read, and the next turn reads only what is
new."""

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine import test_states as hybrid
from tests.engine.rows import measured, options
from tests.engine.small import flush, greedy, in_order, prompt, small, tokenizer

import coattn
from coattn.engine.store import disk as disk_module
from coattn.engine.store import files as files_module
from coattn.engine.store.files import SUFFIX

PARAMS = greedy(6, ignore_eos=True)
TEXTS = [prompt(90, seed=i) for i in range(3)]
MODEL = small(1)
SHARED = ("full", "cpu", "offload", "auto")


@contextmanager
def engine(method: str, folder: Path | None, **more: Any) -> Iterator[coattn.LLM]:
    given = {"max_batch": 3, "max_length": 160, "chunk": 32, **options(method), **more}
    with coattn.LLM((MODEL, tokenizer()), method, disk=folder, **{**given, **measured(method, MODEL)}) as llm:
        yield llm


def save(llm: coattn.LLM) -> None:
    """All that is new is on disk, as it is when nobody has asked for a moment."""
    while llm.step():
        pass
    flush(llm)


def killed(folder: Path) -> Path:
    """The folder as a process leaves it that ends now: nothing is closed."""
    left = folder.with_name(folder.name + "-left")
    shutil.copytree(folder, left)
    return left


@pytest.mark.parametrize("method", SHARED)
def test_the_next_turn_after_a_kill_reads_only_what_is_new(method: str, tmp_path: Path) -> None:
    with engine(method, tmp_path / "kv") as llm:
        firsts = [list(each.token_ids) for each in llm.generate(TEXTS, PARAMS)]
        save(llm)
        left = killed(tmp_path / "kv")
        turns = [text + first + prompt(20, seed=9) for text, first in zip(TEXTS, firsts, strict=True)]
        undisturbed = llm.generate(turns, PARAMS)
    with engine(method, left) as llm:
        again = llm.generate(turns, PARAMS)
        assert [each.token_ids for each in again] == [each.token_ids for each in undisturbed]
        assert [each.cached_tokens for each in again] == [each.cached_tokens for each in undisturbed]
        known = 95 if method != "auto" else 90  # what a lossy method decodes is not shared
        assert all(each.cached_tokens == known // 8 * 8 for each in again) or method == "auto"
        assert all(each.cached_tokens >= 80 for each in again)
        report = llm.report()
        assert report["prefill_tokens"] == sum(map(len, turns)) - sum(each.cached_tokens for each in again)
        assert report["disk"]["read_tokens"] == sum(each.cached_tokens for each in again)
        in_order(llm)


@pytest.mark.parametrize("method", SHARED)
def test_an_engine_that_closes_leaves_everything(method: str, tmp_path: Path) -> None:
    with engine(method, tmp_path) as llm:
        (first,) = llm.generate(TEXTS[0], PARAMS)
        (again,) = llm.generate(TEXTS[0], PARAMS)
    with engine(method, tmp_path) as llm:
        (found,) = llm.generate(TEXTS[0], PARAMS)
        assert (found.token_ids, found.cached_tokens) == (first.token_ids, again.cached_tokens)
        assert found.cached_tokens > 50


@pytest.mark.parametrize("family", hybrid.KINDS)
def test_hybrids_go_on_from_a_state_on_disk(family: str, tmp_path: Path) -> None:
    texts = [[5 + (i * i + 3 * j) % 90 for i in range(60 + 7 * j)] for j in range(3)]
    more: dict[str, Any] = {"disk": tmp_path / "kv"}
    with hybrid.llm(family, "cpu", **more) as llm:
        firsts = [list(each.token_ids) for each in llm.generate(texts, hybrid.asked())]
        save(llm)
        left = killed(tmp_path / "kv")
        turns = [text + first + [7, 8, 9] for text, first in zip(texts, firsts, strict=True)]
        undisturbed = llm.generate(turns, hybrid.asked())
    assert all(each.cached_tokens >= 40 for each in undisturbed)
    with hybrid.llm(family, "cpu", disk=left) as llm:
        again = llm.generate(turns, hybrid.asked())
        assert [each.token_ids for each in again] == [each.token_ids for each in undisturbed]
        assert [each.cached_tokens for each in again] == [each.cached_tokens for each in undisturbed]
        in_order(llm)
    for path in left.glob("*-state" + SUFFIX):  # without states blocks are of no use; a damaged one is not believed
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with hybrid.llm(family, "cpu", disk=left) as llm:
        again = llm.generate(turns, hybrid.asked())
        assert [each.token_ids for each in again] == [each.token_ids for each in undisturbed]
        assert [each.cached_tokens for each in again] == [0, 0, 0]
        assert llm.report()["disk"]["damaged"] > 0
        in_order(llm)


def test_a_hybrid_without_room_for_states_reads_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [5 + i * i % 90 for i in range(60)]
    with hybrid.llm(disk=tmp_path) as llm:
        (want,) = llm.generate(text, hybrid.asked())
    with hybrid.llm(disk=tmp_path) as llm:
        states = llm.runner.runtime.states
        assert states is not None
        monkeypatch.setattr(states, "most", 0)
        (found,) = llm.generate(text, hybrid.asked())
        assert (found.token_ids, found.cached_tokens) == (want.token_ids, 0)
        in_order(llm)


def test_neither_another_key_nor_another_configuration_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine("cpu", tmp_path) as llm:
        llm.submit(TEXTS[0], PARAMS, salt=b"a").result()
    with engine("cpu", tmp_path) as llm:
        assert llm.submit(TEXTS[0], PARAMS, salt=b"b").result().cached_tokens == 0
        assert llm.submit(TEXTS[0], PARAMS).result().cached_tokens == 0
        assert llm.submit(TEXTS[0], PARAMS, salt=b"a").result().cached_tokens == 88
    with engine("cpu", tmp_path, block=16) as llm:
        assert llm.submit(TEXTS[0], PARAMS, salt=b"a").result().cached_tokens == 0
    with engine("offload", tmp_path) as llm:
        assert llm.submit(TEXTS[0], PARAMS, salt=b"a").result().cached_tokens == 0
    monkeypatch.setattr(disk_module, "__version__", "9.9.9")
    with engine("cpu", tmp_path) as llm:
        assert llm.submit(TEXTS[0], PARAMS, salt=b"a").result().cached_tokens == 0
        assert llm.report()["disk"]["damaged"] == 0


def test_a_full_disk_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module.sealed, "write", full)
    with caplog.at_level(logging.WARNING, "coattn"), engine("cpu", tmp_path) as llm:
        made = llm.generate(TEXTS, PARAMS)
        save(llm)
        assert [len(each.token_ids) for each in made] == [6, 6, 6]
        assert llm.report()["disk"]["skipped"] > 20
    assert sum("No space left on device" in line for line in caplog.messages) == 1


def test_writing_never_waits_on_the_engines_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = files_module.sealed.write

    def slowly(*given: Any, **more: Any) -> None:
        time.sleep(0.05)
        write(*given, **more)

    monkeypatch.setattr(files_module.sealed, "write", slowly)
    with engine("cpu", tmp_path) as llm:
        start = time.perf_counter()
        llm.generate(TEXTS, PARAMS)
        assert time.perf_counter() - start < 0.05 * 20, "33 files take longer"
        assert llm.store.disk.files.counts["written"] < 30  # type: ignore[union-attr]


def test_what_is_used_again_stays_on_disk(tmp_path: Path) -> None:
    """A text that is asked for all along is never read from the disk, and must be there after a restart."""
    with engine("cpu", tmp_path) as llm:
        llm.generate(TEXTS[0], PARAMS)
        save(llm)
        size = llm.store.disk.files.held  # type: ignore[union-attr]
        for path in tmp_path.glob("*" + SUFFIX):
            path.unlink()
    with engine("cpu", tmp_path, disk_memory=3 * size) as llm:
        for i in range(6):
            llm.generate(TEXTS[0], PARAMS)
            llm.generate(prompt(90, seed=20 + i), PARAMS)
            save(llm)
        assert llm.report()["disk"]["deleted"] > 0
    with engine("cpu", tmp_path, disk_memory=3 * size) as llm:
        assert llm.generate(TEXTS[0], PARAMS)[0].cached_tokens == 88


def test_blocks_that_cannot_be_copied_cost_nobody_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("cpu", tmp_path) as llm:

        def broken(*_: Any) -> Any:
            raise RuntimeError("no copy")

        monkeypatch.setattr(llm.store.disk._blocks, "read", broken)  # type: ignore[union-attr]
        (found,) = llm.generate(TEXTS[0], PARAMS)
        assert len(found.token_ids) == 6
        assert llm.report()["disk"]["failed"] > 0
        in_order(llm)


def test_a_row_that_does_not_share_says_so_and_writes_nothing(tmp_path: Path) -> None:
    with engine("h2o", tmp_path) as llm:
        llm.generate(TEXTS[0], PARAMS)
        save(llm)
        assert llm.report()["not_shared"] is not None
        assert llm.report()["disk"]["written"] == 0


def test_what_fails_while_saving_costs_no_request_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no such device")

    with engine("full", tmp_path) as llm:
        (first,) = llm.generate(TEXTS[0], PARAMS)
        save(llm)
        monkeypatch.setattr(llm.engine.store.disk.files, "touch_later", fails)  # type: ignore[union-attr]
        with caplog.at_level(logging.WARNING, "coattn"):
            again, other = llm.generate([TEXTS[0], TEXTS[1]], PARAMS)
            save(llm)
        assert again.token_ids == first.token_ids
        assert (again.error, other.error) == (None, None)
        assert "cannot be put on disk: no such device" in caplog.text
        assert llm.report()["disk"]["failed"] >= 1
        in_order(llm)
