"""The command itself: SIGTERM under load, and how it ends when it cannot begin."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.cli.run import coattn
from tests.serve.running import HELLO, Running
from tests.tools.evaluate.tiny import save_model

from coattn.cli.serve import serve
from tests.cli.test_bad_input import assert_refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_model(tmp_path_factory.mktemp("model") / "tiny"))


def test_sigterm_under_load_ends_every_stream_properly(folder: Path) -> None:
    command = [sys.executable, "-m", "coattn", "serve", "--model", str(folder), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen([*command, "--max-batch", "2", "--dtype", "float32"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said: list[str] = []
        url = ""
        for line in process.stderr:
            said.append(line)
            url = url or (found[0] if (found := re.findall(r"http://127\.0\.0\.1:\d+", line)) else "")
            if line.startswith("ready:"):
                break
        assert said[:2] == [f"listening on {url}\n", f"loading {folder}; requests get a 503 meanwhile\n"]
        assert f"a chat is at {url}/, OpenAI's API at {url}/v1, Anthropic's at {url}" in said[-1]
        rest = threading.Thread(target=lambda: said.extend(process.stderr or ()))
        rest.start()
        client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        assert client.get("/ready").status_code == 200  # as the line said
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny"]
        got: list[str] = []
        body = {**HELLO, "max_tokens": 300, "ignore_eos": True, "stream": True}

        def ask() -> None:
            got.append(client.post("/v1/chat/completions", json=body).text)

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for each in asking:
            each.start()
        while len(client.get("/v1/coattn/status").json()["live"]["requests"]) < 4:
            pass
        process.send_signal(signal.SIGTERM)
        for each in asking:
            each.join(60)
        assert process.wait(30) == 0
        rest.join(10)
        assert len(got) == 4
        for text in got:
            assert text.endswith("data: [DONE]\n\n")
            assert json.loads(text.split("\n\n")[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert "Traceback" not in "".join(said)
    finally:
        process.kill()
        process.wait()


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = coattn("serve", "--model", str(tmp_path / "none"), "--port", "0")
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_base_url_is_told_the_right_one(server: Running) -> None:
    for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/v1/messages"):
        got = server.client.post(path, json=HELLO)
        assert (got.status_code, got.json()["error"]["code"]) == (404, "not_found")
        said = f"There is nothing at {path}: the base URL is {server.url}/v1 for OpenAI's clients, {server.url} for"
        assert got.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["--gpu-memory-utilization", "0.9"], "Limit the KV cache in bytes: --gpu-kv 20GiB."),
        (["--tensor-parallel-size=2"], "--devices cuda:0,cuda:1."),
        (["--api-key", "x"], "--api-key-file FILE"),
        (["--quantization", "awq"], "read from the model's config.json"),
        (["--kv-cache-dtype", "fp8"], "--set gpu_dtype=int8"),
        (["--chat-template", "x.jinja"], "as chat_template.jinja"),
        (["--tool-call-parser", "hermes"], "Leave it out"),
    ],
)
def test_options_of_vllm_that_have_no_equal_get_one_hint(given: list[str], hint: str) -> None:
    assert_refused(coattn("serve", *given), "No such option", hint)


def test_options_of_vllm_that_mean_the_same_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(serve, "callback", lambda **given: seen.update(given))
    given = (
        "--max-model-len 4k --max-num-seqs=3 --served-model-name a --enable-prefix-caching --dtype bfloat16 --port 9"
    )
    given += " --enable-auto-tool-choice --kv-cache-memory-bytes 1GiB"
    serve.main(given.split(), standalone_mode=False)
    assert (seen["max_length"], seen["max_batch"], seen["names"], seen["no_reuse"]) == (4000, 3, ("a",), False)
    assert (seen["dtype"], seen["port"], seen["gpu_kv"]) == ("bfloat16", 9, "1GiB")


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coattn.cli.serve.NEEDED", ("fastapi", "no_such_package"))
    assert_refused(coattn("serve"), "Serving needs no_such_package", "Run `pip install no_such_package`, or ")


def test_settings_under_which_nothing_can_be_answered_are_refused_at_the_start(folder: Path) -> None:
    for more in (("--max-length", "256"), ()):
        memory = ("--method", "cpu", "--host-kv", "10KiB", "--set", "window_blocks=1")
        done = coattn("serve", "--model", str(folder), "--port", "0", *memory, *more)
        assert done.returncode == 2
        assert "ready" not in done.stderr
        assert "error: No prompt can be answered: a sequence of 128 tokens needs" in done.stderr
        assert "hint: Raise --host-kv to" in done.stderr


def test_positions_are_asked_for_before_weights(folder: Path) -> None:
    done = coattn("serve", "--model", str(folder), "--port", "0", "--max-length", "513")
    assert done.returncode == 2
    assert f"--max-length is 513, but {folder} has 512 positions." in done.stderr
