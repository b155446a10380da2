"""Bad input gets one sentence and a hint, exit code 2, and no traceback."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.cli.folders import save_tiny
from tests.cli.run import Done, coattn

from coattn.cli.output import print_error
from coattn.errors import ConfigError, WorkerError

HUGE, HERE = "99999999999999999999", "tcp://127.0.0.1:0"


def assert_refused(done: Done, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("error: ")
    assert lines[0].rstrip().endswith(".")
    assert lines[1].startswith("hint: ")
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, on disk: 512 positions."""
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "hello", "--method", "fulll"], ["no method 'fulll'", "full, offload, cpu, "]),
        (["generate", "hello", "--method", "cpu", "--set", "sinks=4"], ["no parameter 'sinks'", "window_blocks"]),
        (["generate", "hello", "--set", "sinks"], ["not NAME=VALUE"]),
        (["generate", "hello", "--method", "auto,now=4"], ["parameters in one", "--method auto --set now=4"]),
        (["generate", "hello", "--method", "streaming", "--set", "sinks=-4"], ["sinks is -4"]),
        (["generate", "hello", "--top-p", "0.5"], ["--temperature"]),
        (["generate", "--file", "/nowhere/at-all.txt"], ["no file /nowhere/at-all.txt"]),
        (["generate"], ["standard input is empty"]),
        (["generate", "--file", ""], ["--file is empty"]),
        (["generate", "w1", "w2"], ["unexpected extra argument (w2)."]),
        (["serve", "--name", " "], ["--name is empty"]),
        (["serve", "--disk-cache", "kv", "--no-reuse"], ["--disk-cache keeps what prompts share"]),
        (["bench", "decode", "--methods", "full,fulll"], ["no method 'fulll'"]),
        (["bench", "decode", "--context", "16", "--steps", "16"], ["--steps is 16"]),
        (["bench", "requests", "--set", "budget=0", "--methods", "scout"], ["budget is 0"]),
        (["trace", "--context", "8", "--steps", "9"], ["too short for 9 steps"]),
        (["methods", "fulll"], ["no method 'fulll'"]),
        (["demo", "--tokens", "600"], ["600 is not in the range x>=1500"]),
        (["eval", "perplexity", "--text", "/nowhere/at-all.txt"], ["no file"]),
        (["models", "get", "bigllm2"], ["bigllm2", "smollm2"]),
        (["generate", "hello", "--method", "offload", "--set", "host_dtype=int8"], ["'pull'", "method cpu"]),
        (["generate", "hello", "--method", "full", "--set", "host_dtype=int8"], ["no parameter 'host_dtype'"]),
        (["generate", "hello", "--method", "cpu", "--set", "host_dtype=int9"], ["'int9'"]),
        (["generate", "hello", "--method", "full", "--set", "gpu_dtype=int9"], ["gpu_dtype is 'int9'", "int4"]),
        (["generate", "hello", "--method", "quest", "--set", "gpu_dtype=int8"], ["index 'digests'", "method full"]),
        (
            ["generate", "hello", "--method", "duo", "--set", "gpu_dtype=int4"],
            ["select 'retrieval_heads'", "method full"],
        ),
        (["generate", "hello", "--method", "cpu", "--set", "block=2048"], ["2,048", "1,024 at most"]),
        (["generate", "hello", "--set", f"block={HUGE}"], ["at most"]),
        (["generate", "hello", "--max-new-tokens", "-1"], ["--max-new-tokens", "--help"]),
        (["generate", "hello", "--model", "/nowhere/model"], ["/nowhere/model"]),
        (["generate", "--no-such-option"], ["No such option", "generate --help"]),
        (["plan", "--model", "x"], ["No such option '--model'.\n", "Did you mean"]),
        (["plan", "llama-3-8b", "--context", HUGE], ["--context", "no sequence has"]),
        (["plan", "llama-3-8b", "--context", "2147483647", "--method", "cpu"], ["67,108,864 blocks", "in proportion"]),
        (["plan", "llama-3-8b", "--gpu", f"{HUGE}GiB"], ["--gpu", "no machine"]),
        (["plan", "llama-3-8b", "--method", "cpu", "--set", "block=1", "--set", "block=2"], ["block twice: 1 and 2"]),
        (["plan", "llama-3-8b", "--method", "hcattention", "--set", "codebook=5"], ["codebook"]),
        (["plan", "llama-3-8b", "--method", "hcattention", "--set", "union=1"], ["union is 1"]),
        (["generate", "w1", "--temperature", "inf"], ["--temperature", "finite"]),
        (["generate", "w1", "--temperature", "1", "--top-p", "nan"], ["--top-p", "finite"]),
        (["generate", "w1", "--max-new-tokens", HUGE], ["--max-new-tokens"]),
        (["generate", "\udcff"], ["not text (UTF-8)"]),
        (["generate", "w1", "--device", "cpu:5"], ["does not run on the device cpu:5"]),
        (["eval", "needle", "--lengths", HUGE], ["--lengths"]),
        (["bench", "decode", "--batch", "2147483647"], ["--batch"]),
        (["generate", "a", "--devices", "cpu:0,"], ["has an empty name"]),
        (["generate", "a", "--device-shares", "1,2"], ["needs --devices"]),
        (["generate", "a", "--devices", "cpu:0,cpu:1", "--device-shares", "1,x"], ["is not a list of numbers"]),
        (["generate", "a", "--devices", "cpu:0,cpu:1", "--device", "cpu"], ["Both devices and device"]),
        (["generate", "a", "--devices", "cpu:0,cpu:1", "--gpu-kv", "1MiB,2MiB,3MiB"], ["3 sizes for 2 devices"]),
        (["serve", "--role", "prefill"], ["--role prefill needs an address"]),
        (["serve", "--role", "decode"], ["--role decode needs an address"]),
        (["serve", "--prefill-at", HERE], ["--prefill-at needs --role"]),
        (["serve", "--role", "prefill", "--prefill-at", HERE, "--prefill-at", HERE], ["listens at one address"]),
        (["serve", "--role", "prefill", "--prefill-at", "127.0.0.1:1"], ["is no address"]),
        (["serve", "--role", "prefill", "--prefill-at", "tcp://0.0.0.0:0"], ["there is no key"]),
        (["serve", "--role", "decode", "--prefill-at", "tcp://machine.example:1"], ["there is no key"]),
        (["serve", "--role", "prefill", "--prefill-at", HERE, "--method", "scout"], ["not exact"]),
        (["serve", "--role", "prefill", "--prefill-at", HERE, "--weights-on-gpu", "1"], ["support --weights-on-gpu"]),
        (["serve", "--role", "prefill", "--prefill-at", HERE, "--lease", "0"], ["--lease"]),
    ],
)
def test_refused_before_a_model_is_loaded(arguments: list[str], words: list[str]) -> None:
    assert_refused(coattn(*arguments), *words)


@pytest.mark.parametrize(("amx", "need"), [(True, 12), (False, 24)])
def test_a_budget_that_is_too_small(folder: Path, monkeypatch: pytest.MonkeyPatch, amx: bool, need: int) -> None:
    """In the dtype that the machine chooses: bfloat16 where it is faster, else float32."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("coattn.hf.load.bfloat16_is_faster", lambda: amx)
    elif not amx:
        pytest.skip("with a GPU it is always bfloat16")
    done = coattn("generate", "w1 w2 w3", "--model", str(folder), "--gpu-kv", "1KiB", "--max-new-tokens", "4")
    assert_refused(done, f"needs at least {need}.0 KiB", "--gpu-kv is 1.0 KiB", f"Raise --gpu-kv to {need}", "7 tokens")


def test_arguments_of_the_library_are_the_options_they_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ConfigError("max_length is 9, not --gpu-kv.", "Set max_length=8 or less; 'gpu_kv' is a key."))
    found = "error: --max-length is 9, not --gpu-kv.\nhint: Set --max-length 8 or less; 'gpu_kv' is a key.\n"
    assert capsys.readouterr().err == found


def test_a_window_that_is_larger_than_the_machine(folder: Path) -> None:
    done = coattn("generate", "w1 w2", "--model", str(folder), "--method", "cpu", "--set", "window_blocks=2000000000")
    assert_refused(done, "on this machine.")


def test_a_window_that_the_system_would_promise_and_not_give(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is allocated: such a process is killed only when it writes to its memory."""
    monkeypatch.setattr("coattn.cache.available.memory", lambda: (128 << 20, 100 << 20))
    done = coattn("generate", "w1 w2", "--model", str(folder), "--method", "cpu", "--set", "window_blocks=200000")
    assert_refused(done, "in DRAM, but only 80.0 MiB is free for it on this machine.", "the window")


def test_an_answer_that_is_cut_off_ends_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(text="half an answ")
        raise WorkerError("It failed.", "Try again.")

    monkeypatch.setattr("coattn.engine.watch.stream", fail)
    done = coattn("generate", "w1 w2", "--model", str(folder))
    assert (done.returncode, done.stdout) == (2, "half an answ\n")
    assert done.stderr.startswith("error: It failed.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "w1", "--gpu-kv", "lots"], ["--gpu-kv is 'lots'"]),
        (["generate", " ".join(["w5"] * 600)], ["600 tokens", "only 512 positions"]),
        (["eval", "fidelity", "--length", "600"], ["--length is 600", "only 512 positions"]),
        (["chat"], ["no chat template", "coattn generate --raw"]),
        (["generate", "w1", "--max-new-tokens", "100000000"], ["512 positions", "Give 512 or less"]),
        (["eval", "needle", "--lengths", "99999999"], ["100,000,023 positions", "at most 488"]),
        (["eval", "perplexity", "--length", "300", "--start", "99999999"], ["--start is 99,999,999", "--length"]),
    ],
)
def test_refused_by_the_model(folder: Path, arguments: list[str], words: list[str]) -> None:
    assert_refused(coattn(*arguments, "--model", str(folder), stdin="w1\n"), *words)


def test_a_text_that_is_too_short(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("w1 w2 w3 w4 w5")
    done = coattn("eval", "perplexity", "--model", str(folder), "--length", "100", "--text", str(text))
    assert_refused(done, "has only 5 tokens")


def test_a_file_that_is_not_text(folder: Path, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\xff\xfe")
    for command in (["generate", "--file"], ["eval", "perplexity", "--text"]):
        assert_refused(coattn(*command, str(image), "--model", str(folder)), "is not a text file")
    image.write_bytes(b"  \n")
    assert_refused(coattn("generate", "--file", str(image), "--model", str(folder)), "is empty")


def test_a_model_folder_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    assert_refused(coattn("generate", "w1", "--model", str(tmp_path)), str(tmp_path))
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((folder / name).read_bytes())
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    assert_refused(coattn("generate", "w1", "--model", str(broken)), str(broken))


def test_a_row_from_a_file_runs(folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.toml"
    rows.write_text(
        '[method.mine]\ncache = "recent"\nselect = "everything"\nexecutor = "gpu"\nschedule = "inline"\n'
        "[method.mine.params]\nsinks = 2\nrecent = 6\n"
    )
    command = ["generate", "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10", "--model", str(folder), "--json", "--max-new-tokens", "5"]
    done = coattn(*command, "--method", str(rows))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["method"], result["params"]["recent"], result["new_tokens"]) == ("mine", 6, 5)
    assert coattn("methods", str(rows), "--json").returncode == 0


def test_an_answer_that_ends_with_the_model_s_positions_says_so(folder: Path) -> None:
    command = ["generate", "w1 " * 505, "--model", str(folder), "--raw", "--max-new-tokens", "200"]
    done = coattn(*command, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["prompt_tokens"] + found["new_tokens"] <= 512
    assert (found["finish_reason"], found["new_tokens"] < 10) == ("length", True)
    assert "reached the model's context length" in coattn(*command).stderr


def test_an_output_that_cannot_be_written(folder: Path) -> None:
    done = coattn("eval", "fidelity", "--model", str(folder), "--length", "64", "--out", "/proc/nowhere/x.json")
    assert_refused(done, "cannot be written")


@pytest.mark.parametrize("words", [[], ["eval"], ["bench"]], ids=" ".join)
def test_a_group_without_a_command_shows_its_help(words: list[str]) -> None:
    done = coattn(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Usage: {' '.join(['coattn', *words])} ")
    assert "Commands:" in done.stderr


def test_prompts_longer_than_the_positions_do_not_calibrate(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "heads.json"
    done = coattn("calibrate", "duo", "--model", str(folder), "--length", "600", "--out", str(made))
    assert_refused(done, "--length is 600", "only 512 positions")
    assert not made.exists()


def test_a_session_that_could_not_be_saved_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sessions").write_text("a file where the folder should be")
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path))
    done = coattn("chat", "--session", "talk", "--model", "no/where", stdin="w1\n")
    assert_refused(done, "'talk' cannot be saved", "COATTN_CACHE")


def test_what_is_not_ours_is_not_written_over(tmp_path: Path, folder: Path) -> None:
    notes, other = tmp_path / "notes.txt", tmp_path / "other.json"
    notes.write_text("mine\n")
    other.write_text('{"mine": 1}\n')
    small = ["--model", str(folder), "--context", "64", "--methods", "full", "--steps", "4"]
    commands = [
        ["bench", "decode", *small],
        ["trace", "--model", str(folder), "--context", "64"],
        ["eval", "needle", "--model", str(folder)],
        ["calibrate", "hcattention", "--model", str(folder), "--text", str(notes)],
    ]
    for command in commands:
        for path in (notes, other):
            assert_refused(coattn(*command, "--out", str(path)), path.name, "not a result of coattn", "remove the file")
    assert notes.read_text() == "mine\n"
    assert other.read_text() == '{"mine": 1}\n'
    picture = tmp_path / "figure.png"
    picture.write_bytes(b"mine")
    assert_refused(coattn("bench", "decode", *small, "--out", str(tmp_path / "figure.json")), "figure.png")
    assert picture.read_bytes() == b"mine"


def test_a_command_writes_over_its_own_results_alone(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "found.json"
    small = ["--model", str(folder), "--context", "64", "--methods", "full", "--steps", "4"]
    for _ in range(2):
        assert coattn("bench", "decode", *small, "--out", str(path)).returncode == 0
    whole = path.read_text()
    assert_refused(coattn("bench", "prefill", "--out", str(path)), "another command", "coattn bench decode")
    path.write_text(json.dumps({**json.loads(whole), "unfinished": True}))
    assert_refused(coattn("bench", "decode", *small, "--batch", "2", "--out", str(path)), "before it was cut off")
    assert coattn("bench", "decode", *small, "--out", str(path)).returncode == 0
    assert "unfinished" not in json.loads(path.read_text())


def test_a_refused_command_leaves_no_file(tmp_path: Path, folder: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 " * 40)
    made = tmp_path / "book.safetensors"
    asked = ["calibrate", "hcattention", "--model", str(folder), "--text", str(text), "--groups", "7"]
    assert_refused(coattn(*asked, "--out", str(made)), "--groups is 7", "does not divide the head size")
    assert not made.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "coattn", "plan", "--list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: Output cannot be written: No space left on device."
    assert len(done.stderr.splitlines()) == 2
