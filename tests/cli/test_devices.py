"""--devices on the command line."""

from __future__ import annotations

import json

import pytest
from tests.cli.run import coattn

PLAN = ("plan", "--shapes", "qwen3-8b", "--context", "4096")


def test_plan_says_what_each_device_holds() -> None:
    done = coattn(*PLAN, "--method", "cpu", "--devices", "cuda:0,cuda:1", "--gpu-memory", "8GiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = found["devices"]
    assert [row["layers"] for row in rows] == [[0, 17], [18, 35]]
    assert sum(row["weight_bytes"] for row in rows) == found["weight_bytes"]
    for tier in ("gpu", "host"):
        assert sum(row[f"{tier}_kv_bytes"] for row in rows) == found[f"{tier}_kv_bytes"]
    assert found["fits_gpu"], "neither would fit on one of them"
    assert found["gpu_bytes"] > 8 << 30


def test_plan_shows_a_table_of_devices() -> None:
    done = coattn(*PLAN, "--devices", "cuda:0,cuda:1", "--device-shares", "3,1", "--gpu-memory", "9GiB")
    assert "On each device" in done.stdout
    assert "0 to 28" in done.stdout
    assert "no" in done.stdout


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
        ((*PLAN, "--devices", "cuda:0,what"), "has no device"),
        (
            (*PLAN, "--devices", "cuda:0,cuda:1", "--weights-on-gpu", "0.5"),
            "--weights-on-gpu exclude each other",
        ),
    ],
)
def test_bad_input_ends_with_2(arguments: tuple[str, ...], said: str) -> None:
    done = coattn(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
