"""`coattn serve --role`: keys that are none, and a process that reads for another."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.run import coattn
from tests.engine.small import prompt
from tests.tools.evaluate.tiny import save_model

from coattn import LLM
from coattn.hf.prefilled import Prefilled
from coattn.transfer.decode import RemotePrefill

HERE = "tcp://127.0.0.1:0"


def test_an_empty_key_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("\n")
    options = ["--role", "prefill", "--prefill-at", HERE]
    assert "is empty" in coattn("serve", *options, "--transfer-key-file", str(tmp_path / "key")).stderr
    monkeypatch.setenv("COATTN_TRANSFER_KEY", " ")
    assert "is empty" in coattn("serve", *options).stderr


def test_a_process_reads_until_it_is_told_to_end(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "key").write_text("secret\n")
    place = f"shm://{tmp_path / 'socket'}"
    command = [sys.executable, "-m", "coattn", "serve", "--role", "prefill", "--prefill-at", place]
    more = ["--model", str(tmp_path / "model"), "--transfer-key-file", str(tmp_path / "key")]
    more += ["--device", "cpu", "--dtype", "float32"]
    process = subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True)
    try:
        said = next(line for line in process.stderr if line.startswith("ready:"))
        assert place in said
        with (
            LLM(tmp_path / "model", max_length=256, dtype="float32", device="cpu") as engine,
            RemotePrefill(engine, place, key=b"secret") as remote,
        ):
            remote.check()
            assert isinstance(remote.read(prompt(60)), Prefilled)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert remote.read(prompt(61)) == prompt(61)
        assert not (tmp_path / "socket").exists()
    finally:
        process.kill()
        process.wait()
