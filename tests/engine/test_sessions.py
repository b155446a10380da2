"""Turns that are appended to what is stored; sessions that are saved, damaged, swapped, dropped and gone on with."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.rows import options, resumes
from tests.engine.small import UNIT, Only, check_tables, greedy, prompt, small, tokenizer

import coattn
from coattn.engine.prompts import encode_chat
from coattn.engine.session_file import SUFFIX, Sessions
from coattn.errors import BusyError, ConfigError, InputError
from coattn.method.table import METHODS

PARAMS = greedy(5, ignore_eos=True)
TURNS = tuple(prompt(n, seed=n) for n in (45, 3, 20))


def engine(method: str, folder: Path, seed: int = 0, **more: Any) -> coattn.LLM:
    given = {"max_batch": 2, "max_length": 160, "chunk": 32, "session_dir": folder, **options(method), **more}
    return coattn.LLM((small(1, seed), tokenizer()), method, **given)


PACKED = {"host_dtype": "int8"}
"""Blocks whose scales lie in GPU memory too."""
CODED = [("full", {"gpu_dtype": "int8"}), ("full", {"gpu_dtype": "int4"})]


@pytest.mark.parametrize(("method", "more"), [*((name, {}) for name in METHODS), ("auto", PACKED), *CODED])
def test_a_turn_reads_nothing_again_also_after_a_restart(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    stored = [0, 45 + 4, 45 + 5 + 3 + 4]  # the last token of an answer is not stored
    if not resumes(method):
        stored = [0, 0, 0]  # its turns are read again
    with engine(method, tmp_path, **more) as llm:
        session, other = llm.session("talk"), llm.session()
        for i, turn in enumerate(TURNS[:2]):
            assert session.ask(turn, PARAMS).cached_tokens == stored[i]
            assert other.ask(turn, PARAMS).finish_reason == "length"
        assert len(session.tokens) == 58
        session.save()
        read = llm.report()["prefill_tokens"]
        want = session.ask(TURNS[2], PARAMS)
        assert want.cached_tokens == stored[2]
        assert llm.report()["prefill_tokens"] - read == len(TURNS[2]) + 58 - stored[2]
        # others come between, in the same slots
        llm.generate([prompt(60, seed=i) for i in range(3)], PARAMS)
        beside = other.ask(TURNS[2], PARAMS)
        assert beside.cached_tokens == stored[2]
        if method != "random":  # its draws go on
            assert beside.token_ids == want.token_ids
        check_tables(llm)
    with engine(method, tmp_path, **more) as llm:
        again = llm.session("talk")
        assert len(again.tokens) == 58
        found = again.ask(TURNS[2], PARAMS)
        assert found.cached_tokens == stored[2]
        if method != "random":
            assert found.token_ids == want.token_ids


@pytest.mark.parametrize(("method", "more"), [("cpu", {}), ("auto", {"quality": 1.0, "block": 8, "window_blocks": 2})])
def test_exact_turns_are_those_of_one_long_prompt(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    with engine(method, tmp_path, **more) as llm:
        session, said = llm.session(), []
        for turn in TURNS:
            said += turn
            found = session.ask(turn, PARAMS)
            assert found.token_ids == llm.submit(said, PARAMS, salt=b"nobody's").result().token_ids
            said += found.token_ids
        assert session.tokens == said


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    with engine("full", tmp_path) as llm:
        session = llm.session("chat")
        for word in ("hello", "and then?"):
            session.ask([{"role": "user", "content": word}], PARAMS)
        said = session.messages
        assert [each["role"] for each in said] == ["user", "assistant"] * 2
        session.save()
        session.close()
        assert llm.session("chat").messages == said


AX = 257
"""The token of `ax` in `chatting`."""


def chatting(folder: Path, method: str = "cpu") -> coattn.LLM:
    """An engine whose template has a generation prompt, as those of real models have."""
    given = {"max_batch": 2, "max_length": 160, "chunk": 32, "session_dir": folder, **options(method)}
    return coattn.LLM((small(1), tokenizer("ax", generation_prompt="assistant: ")), method, **given)


@pytest.mark.parametrize(
    ("answer", "stop", "kept"),
    [
        (b"I see. 1xG and more", {"stop": ("1xG",)}, "I see. "),
        ([*b"so b", AX, *b" on"], {"stop": ("x",)}, "so ba"),
        (b"stop", {"stop": ("stop",)}, ""),
        ("caf\u00e9!?".encode(), {"stop": ("!",)}, "caf\u00e9"),
        (b"yes; no", {"stop_token_ids": (ord(";"),)}, "yes"),
        (b"whole", {"stop": ("never",)}, "whole"),
    ],
    ids=["tokens", "inside a token", "nothing left", "two bytes", "stop token", "none"],
)
def test_what_a_stop_string_cuts_off_is_not_part_of_the_conversation(
    answer: Any, stop: dict[str, Any], kept: str, tmp_path: Path
) -> None:
    new = [{"role": "user", "content": "go on"}]
    with chatting(tmp_path) as llm:
        session = llm.session("chat")
        handle = session.submit([{"role": "user", "content": "hello"}], greedy(40, **stop), guide=Only(list(answer)))
        assert handle.result().text == kept
        assert session.messages[-1] == {"role": "assistant", "content": kept}
        whole = encode_chat([*session.messages, *new], llm.tokenizer)
        assert session.whole(new) == whole
        session.save()
        want = session.ask(new, PARAMS)
        assert want.token_ids == llm.submit(whole, PARAMS, salt=b"nobody's").result().token_ids
        assert want.cached_tokens >= 16, "what was said before is still stored"
        check_tables(llm)
    with chatting(tmp_path) as llm:
        again = llm.session("chat")
        assert again.whole(new) == whole
        found = again.ask(new, PARAMS)
        assert (found.token_ids, found.cached_tokens) == (want.token_ids, want.cached_tokens)


def test_a_text_goes_on_after_what_a_stop_string_left_of_it(tmp_path: Path) -> None:
    with chatting(tmp_path) as llm:
        session = llm.session()
        session.submit("one", greedy(40, stop=("x",)), guide=Only([*b" b", AX, *b" c"])).result()
        assert session.tokens == list(b"one ba")
        assert session.whole(" two") == list(b"one ba two")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    """A folder with a session, and the answer to its next turn."""
    folder = tmp_path_factory.mktemp("sessions")
    with engine("hgca", folder) as llm:
        session = llm.session("talk")
        session.ask(TURNS[0], PARAMS)
        session.save()
        return folder, session.ask(TURNS[1], PARAMS).token_ids


def test_whatever_is_damaged_is_refused_and_the_next_answer_is_right(
    saved: tuple[Path, tuple[int, ...]], tmp_path: Path
) -> None:
    folder, want = saved
    whole = (folder / f"talk{SUFFIX}").read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    data = range(8 + header, len(whole))
    places = [*range(8), *range(8, 8 + header, 29), 8 + header - 1, *data[:: len(data) // 40], len(whole) - 1]
    damaged = [whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for at in places for bit in (1, 128)]
    damaged += [whole[:cut] for cut in (0, 4, 8, 100, 8 + header, len(whole) // 2, len(whole) - 1)]
    half = (len(data) // 2) & ~7
    damaged += [whole + b"\0", whole[: data[half]] + whole[data[0] : data[half]] + whole[data[0] + 2 * half :]]
    with engine("hgca", tmp_path) as llm:
        free = dict(llm.runner.runtime.free_bytes())
        for made in damaged:
            (tmp_path / f"talk{SUFFIX}").write_bytes(made)
            with pytest.raises(InputError) as refused:
                llm.session("talk")
            assert str(refused.value).count("\n") == 0
            assert refused.value.hint
        assert dict(llm.runner.runtime.free_bytes()) == free
        assert llm.report()["sessions_stored"] == 0
        (tmp_path / f"talk{SUFFIX}").write_bytes(whole)
        assert llm.session("talk").ask(TURNS[1], PARAMS).token_ids == want


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"seed": 1}, "weights"),
        ({"method": "full"}, "method 'hgca'"),
        ({"beta": 0.25}, "other parameters"),
        ({"max_length": 40}, "tokens"),
    ],
)
def test_what_belongs_to_another_is_refused(saved: tuple[Path, tuple[int, ...]], other: Any, word: str) -> None:
    given = {"method": "hgca", **other}
    with engine(folder=saved[0], **given) as llm:
        with pytest.raises(InputError, match=word):
            llm.session("talk")
        assert llm.generate(TURNS[0][:20], PARAMS)[0].finish_reason == "length"


def test_another_tokenizer_is_refused(saved: tuple[Path, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("hgca", saved[0]) as llm:
        monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ messages }}")
        with pytest.raises(InputError, match="chat template"):
            llm.session("talk")


def test_names_are_no_paths(tmp_path: Path) -> None:
    folder = Sessions(tmp_path / "sessions")
    for name in ("", "..", "a/b", "../x", "/etc/passwd", ".hidden", "x" * 65, "a\nb", "a.", None, 3, "ü"):
        with pytest.raises(InputError, match="no name of a session"):
            folder.path(name)
    assert folder.names() == []
    with pytest.raises(InputError, match="no session 'x'"):
        folder.delete("x")
    with pytest.raises(InputError, match="no session 'x'"):
        folder.load("x")


def test_a_place_that_takes_no_file_is_said_with_another() -> None:
    folder = Sessions(Path("/proc/nothing/sessions"))
    with pytest.raises(InputError, match="'x' cannot be saved") as refused:
        folder.save("x", {"tokens": torch.zeros(1)}, {})
    assert "COATTN_CACHE" in str(refused.value.hint)


def test_saved_listed_deleted(tmp_path: Path) -> None:
    with engine("full", tmp_path) as llm:
        with pytest.raises(ConfigError, match="no name"):
            llm.session().save()
        with llm.session("b") as session:
            session.ask(TURNS[0], PARAMS)
            session.save()
            session.save("a")
        assert llm.sessions.names() == ["a", "b"]
        assert [each.name for each in tmp_path.iterdir() if each.suffix != SUFFIX] == []
        llm.sessions.delete("b")
        assert llm.sessions.names() == ["a"]
        assert llm.session("b").tokens == []
        with pytest.raises(InputError, match="closed"):
            session.ask(TURNS[0], PARAMS)


def test_one_turn_at_a_time_and_a_failed_one_changes_nothing(tmp_path: Path) -> None:
    with engine("cpu", tmp_path) as llm:
        session = llm.session()
        want = session.ask(TURNS[0], PARAMS).token_ids
        handle = session.submit(TURNS[1], PARAMS)
        with pytest.raises(BusyError, match="still answering"):
            session.ask(TURNS[2], PARAMS)
        handle.cancel()
        assert len(session.tokens) == 45 + 5 + 3, "what was said counts, though it was cancelled"
        with pytest.raises(InputError, match="prompt has"):
            session.ask(prompt(150), PARAMS)
        session.reset()
        assert session.ask(TURNS[0], PARAMS).token_ids == want


@pytest.mark.parametrize("host_kv", [1, None])
def test_sessions_give_way_to_dram_or_read_again(host_kv: int | None, tmp_path: Path) -> None:
    with engine("full", tmp_path, gpu_kv=30 * UNIT, host_kv=host_kv) as llm:
        sessions = [llm.session() for _ in range(3)]
        for i, session in enumerate(sessions):
            session.ask(prompt(70, seed=i), PARAMS)
        llm.generate(prompt(140, seed=9), PARAMS)
        assert (llm.report()["sessions_stored"] == 3) == (host_kv is None), "the least recently used gives way"
        assert (llm.report()["sequences_moved"] > 0) == (host_kv is None)
        want = llm.submit(sessions[0].tokens + TURNS[1], PARAMS, salt=b"x").result()
        found = sessions[0].ask(TURNS[1], PARAMS)
        assert found.token_ids == want.token_ids
        assert (found.cached_tokens == 74) == (host_kv is None)
        for session in sessions:
            session.close()
        assert llm.ledger.held["host"] == 0
        check_tables(llm)


def test_a_closed_session_keeps_nothing(tmp_path: Path) -> None:
    with engine("cpu", tmp_path) as llm:
        session = llm.session()
        session.ask(TURNS[0], PARAMS)
        handle = session.submit(TURNS[1], PARAMS)
        llm.step()
        session.close()
        assert handle.result().finish_reason == "cancelled"
        assert llm.report()["sessions_stored"] == 0
        assert dict(llm.runner.runtime.free_bytes()) == llm.engine.scheduler.admission.capacity
