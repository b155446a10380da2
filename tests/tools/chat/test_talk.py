"""A conversation with an engine: messages of several lines, files, statistics, and a stop."""

import importlib
import io
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.cli.run import coattn
from tests.engine.small import greedy, llm
from tests.tools.evaluate.tiny import save_model

from coattn import LLM
from coattn.engine.sampling.params import SamplingParams
from coattn.errors import InputError
from coattn.tools.chat.partner import Partner
from coattn.tools.chat.server import Server
from coattn.tools.chat.talk import Talk

pytest.importorskip("httpx2")
from tests.serve.running import serving

from coattn.serve.settings import Settings

cli_chat = importlib.import_module("coattn.cli.chat")
ASKED = SamplingParams(8, 0.0, 1.0)


class Desk:
    """A scripted person."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.written, self.told = iter(lines), "", []

    def read(self, _: str) -> str:
        found = next(self.lines, None)
        if found is None:
            raise EOFError
        return found

    def talk(self, partner: Partner | Server, system: str | None = None) -> Talk:
        made = Talk(partner, ASKED, system, self.read, self.write, self.told.append)
        made.run()
        return made

    def write(self, piece: str) -> None:
        self.written += piece


@pytest.fixture
def partner() -> Iterator[Partner]:
    with closing(Partner(llm("full", max_batch=1))) as made:
        yield made


def test_answers_are_those_of_the_engine_and_the_conversation_grows(partner: Partner) -> None:
    talk = Desk("hello", "and again").talk(partner, system="be brief")
    assert [each["role"] for each in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    for end in (2, 4):
        want = partner.llm.generate(talk.messages[:end], greedy(8))[0].text
        assert talk.messages[end]["content"] == want


def test_several_lines_and_files(partner: Partner, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("from a file\n")
    file = f"/file {tmp_path / 'notes'}"
    desk = Desk("one\\", "two", '"""', "three", "", "four", '"""', file, "five", "six", "", "/quit", "x")
    talk = desk.talk(partner)
    said = [each["content"] for each in talk.messages if each["role"] == "user"]
    assert said == ["one\ntwo", "three\n\nfour", "from a file\n\n\nfive", "six"]


def test_commands(partner: Partner, tmp_path: Path) -> None:
    desk = Desk("/stats", "hello", "/stats", "/reset", "/help")
    talk = desk.talk(partner)
    told = "\n".join(desk.told)
    assert "nothing has been answered yet" in told
    assert "full (exact)" in told
    assert "8 written" in told
    assert "forgotten" in told
    assert talk.messages == []
    desk = Desk("/nothing", "/file", f"/file {tmp_path / 'none'}", "x" * 400)
    desk.talk(partner)
    assert sum(each.startswith("error: ") for each in desk.told) == 4
    assert sum(each.startswith("hint: ") for each in desk.told) == 4


def test_an_interrupt_stops_the_answer_and_keeps_what_there_is(partner: Partner) -> None:
    desk = Desk("hello", "/stats")

    def stop(piece: str) -> None:
        desk.written += piece
        if len(desk.written) == 1:
            raise KeyboardInterrupt

    talk = Talk(partner, ASKED, None, desk.read, stop, desk.told.append)
    talk.run()
    assert len(talk.messages[-1]["content"]) >= 1
    assert partner.llm.report()["requests"]["cancelled"] == 1
    assert partner.llm.report()["running"] == 0


def test_the_command(tmp_path: Path) -> None:
    asked = ["--model", save_model(tmp_path), "--temperature", "0", "--max-new-tokens", "5", "--device", "cpu"]
    done = coattn("chat", *asked, "--dtype", "float32", stdin="hello\n/stats\n")
    with LLM(str(tmp_path), device="cpu", dtype="float32") as engine:
        want = engine.generate([{"role": "user", "content": "hello"}], greedy(5))[0].text
    assert (done.returncode, done.stdout) == (0, want + "\n")
    assert "5 written" in done.stderr
    assert "under full (exact), up to 512 tokens. /help lists the commands" in done.stderr
    assert "Ctrl-D leaves" in done.stderr


def test_a_server_on_this_machine_is_found_and_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--temperature", "0", "--max-new-tokens", "5"]
    with serving() as server:
        monkeypatch.setattr(cli_chat, "SERVER", server.url)
        done = coattn("chat", *asked, stdin="hello\n/stats\n/nothing\n")
        want = server.llm.generate([{"role": "user", "content": "hello"}], greedy(5))[0].text
        assert (done.returncode, done.stdout) == (2, want + "\n"), done.stderr
        assert f"small under full (exact), up to 256 tokens, on the server at {server.url}. /help" in done.stderr
        assert "full (exact): 12 tokens read, 5 written" in done.stderr
        assert "There is no command /nothing." in done.stderr
        named = coattn("chat", *asked, "--url", server.url + "/v1/", stdin="hello\n")
        assert (named.returncode, named.stdout) == (0, want + "\n")
        refused = coattn("chat", "--url", server.url, "--set", "block=8")
        assert (refused.returncode, "--set has no effect on the server" in refused.stderr) == (2, True)
        missing = coattn("chat", "--method", "full", "--model", "/nowhere")
        assert (missing.returncode, server.url in missing.stderr) == (2, False), "an option of the engine: no server"
    with serving(Settings(port=0, keys=("secret",), names=("small",))) as server:
        monkeypatch.setattr(cli_chat, "SERVER", server.url)
        assert cli_chat.find_server(None, False) is None, "it wants a key, which only --url gives"
        monkeypatch.setenv("COATTN_API_KEY", "secret")
        partner = cli_chat.find_server(server.url, False)
        assert partner is not None
        talk = Desk("hello", "and again").talk(partner, system="be brief")
        assert talk.messages[2]["content"] == server.llm.generate(talk.messages[:2], greedy(8))[0].text
    assert cli_chat.find_server(None, False) is None
    monkeypatch.setattr("coattn.cli.options.load_model", lambda *_: (_ for _ in ()).throw(InputError("No.", "No.")))
    assert coattn("chat").stderr.splitlines()[:2] == ["Loading smollm2; --model takes another.", "error: No."]
    with pytest.raises(InputError, match="cannot be reached"):
        cli_chat.find_server(server.url, False)


def test_a_session_is_saved_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path))

    said: list[list[Any]] = []
    for word in ("hello", "and now?"):
        with closing(Partner(llm("cpu", max_batch=1), "ours")) as partner:
            said.append(Desk(word).talk(partner).messages)
            assert partner.session.messages == said[-1]
            assert (partner.llm.report()["cached_tokens"] > 0) == (word != "hello")
    assert said[1][:2] == said[0]
    listed = coattn("sessions", "--json")
    assert listed.returncode == 0
    assert '"ours"' in listed.stdout
    assert coattn("sessions", "delete", "ours").returncode == 0
    assert coattn("sessions", "delete", "ours").returncode == 2
    assert coattn("chat", "--session", "a/b").returncode == 2


def test_what_failed_is_counted_and_leaves_no_line(partner: Partner) -> None:
    desk = Desk("/file /nowhere/at-all", "x" * 3000, "hello")
    talk = desk.talk(partner)
    assert talk.failed == 2
    assert desk.written == talk.messages[-1]["content"] + "\n"


def test_a_line_that_is_no_text_is_said_and_the_next_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    from coattn.cli import chat

    pipe = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\nhello\n"))
    monkeypatch.setattr("sys.stdin", pipe)
    with pytest.raises(InputError, match="not text"):
        chat.read("> ")
    assert chat.read("> ") == "hello"
    with pytest.raises(EOFError):
        chat.read("> ")


def test_a_message_with_half_a_character(partner: Partner) -> None:
    desk = Desk("\udcff", "hello")
    assert desk.talk(partner).failed == 1
    assert "half a character" in desk.told[0]
    with pytest.raises(InputError, match="half a character"):
        partner.llm.generate("\ud800")
