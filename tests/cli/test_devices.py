"""--devices on the command line."""

from __future__ import annotations

import json

import pytest
from tests.cli.run import coattn


@pytest.mark.model
def test_generate_on_two_devices() -> None:
    answers = []
    for more in ((), ("--devices", "cpu:0,cpu:1", "--gpu-kv", "64MiB,64MiB")):
        done = coattn(
            "generate", "Once upon a time", "--raw", "--dtype", "float32", "--max-new-tokens", "4", *more, "--json"
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[0]["text"] == answers[1]["text"]
    assert [row["device"] for row in answers[1]["devices"]] == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "a", "--devices", "cpu:0,"), "has an empty name"),
        (("generate", "a", "--device-shares", "1,2"), "needs --devices"),
        (("generate", "a", "--devices", "cpu:0,cpu:1", "--device-shares", "1,x"), "is not a list of numbers"),
        (("generate", "a", "--devices", "cpu:0,cpu:1", "--device-shares", "1"), "1 device_shares for 2 devices"),
        (("generate", "a", "--devices", "cpu:0,cpu:1", "--device", "cpu"), "Both devices and device"),
        (("generate", "a", "--devices", "cpu:0,cpu:1", "--weights-on-gpu", "0.5"), "Both devices and weights_on_gpu"),
        (("generate", "a", "--devices", "cpu:0,cpu:1", "--gpu-kv", "1MiB,2MiB,3MiB"), "3 sizes for 2 devices"),
        (("generate", "a", "--devices", "cuda:0,tpu:1"), "device"),
    ],
)
def test_bad_input_ends_with_2(arguments: tuple[str, ...], said: str) -> None:
    done = coattn(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
