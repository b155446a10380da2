"""The benchmark's own arithmetic. Speed is never tested, only that what is reported is what was done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lab.tests.run import coattn_lab

from coattn import native
from coattn.kernels.quantise.values import ValueBlocks
from coattn_lab.bench import ops
from coattn_lab.bench.timing import Disturbance, in_turn, spread

KEYS = {"kernel", "isa", "dtype", "group", "head_size", "threads", "gbps", "limit_gbps", "share", "torch_gbps"}


def test_the_command_reports_every_case(tmp_path: Path) -> None:
    target = tmp_path / "ops.json"
    options = [
        "--mib",
        "16",
        "--seconds",
        "0.01",
        "--jobs",
        "100",
        "--groups",
        "1,3",
        "--head-sizes",
        "64",
        "--threads",
        "1",
    ]
    done = coattn_lab("bench", "ops", *options, "--dtypes", "bf16,int8", "--out", str(target), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads(target.read_text()) == result
    assert target.with_suffix(".png").stat().st_size > 5_000
    found = [(row["kernel"], row["dtype"], row["group"]) for row in result["rows"]]
    assert len(found) == len(set(found)) == 2 * (2 + 2)
    for row in result["rows"]:
        assert row.keys() >= KEYS
        assert row["gbps"] > 0
        assert row["limit_gbps"] > 0
        # the limit is the best of its runs, the share pairs each call with the reading before it
        assert row["share"] >= row["gbps"] / row["limit_gbps"] * 0.999
        assert row["isa"] == native.isa()
        assert (row["torch_gbps"] is not None) == (row["kernel"] == "attend")
    errors = {row["dtype"]: row["error"] for row in result["rows"] if row["kernel"] == "attend"}
    assert errors["bf16"] < errors["int8"] < 0.03
    assert result["latency"][0]["busy_disturbance"].keys() == {"steal_ms", "involuntary_switches"}
    assert result["latency"][0]["spinning"].keys() == {"seconds", "max_us", "over_200us", "steal_ms"}
    assert result["latency"][0]["empty"]["median_us"] < result["latency"][0]["busy_100us"]["median_us"]


def test_quick_leaves_what_was_said() -> None:
    said = ["--quick", "--mib", "16", "--seconds", "0.01", "--groups", "3", "--jobs", "100", "--no-torch"]
    done = coattn_lab("bench", "ops", *said, "--threads", "1", "--dtypes", "bf16", "--kernels", "attend", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(row["group"], row["head_size"]) for row in result["rows"]] == [(3, 128)]
    assert result["latency"][0]["empty"]["jobs"] == 100


def test_in_turn() -> None:
    calls: list[str] = []
    found = iter(range(100))

    def other() -> float:
        calls.append("other")
        return float(next(found))

    pairs = in_turn(lambda: calls.append("run"), other, 0.0)
    assert calls == ["run"] * 2 + ["other", "run"] * 5
    assert [value for _, value in pairs] == [0, 1, 2, 3, 4]
    assert all(taken >= 0 for taken, _ in pairs)


@pytest.mark.parametrize("element", ["bf16", "int8", "int4"])
def test_what_is_summed_are_the_values(element: str) -> None:
    work = ops.Work(element, 64, 1 << 20)
    first = work.order[: ops.TILE]
    stored = ValueBlocks(work.values.memory, "model" if element == "bf16" else element, ops.BLOCK, 64)
    rows = stored.read(first, torch.float32).transpose(1, 2).flatten(0, 1)
    assert (rows - work.v).norm() < {"bf16": 0.004, "int8": 0.01, "int4": 0.12}[element] * work.v.norm()


@pytest.mark.parametrize("element", ["f32", "bf16", "int8", "int4"])
def test_the_work_is_as_large_as_it_says(element: str) -> None:
    work = ops.Work(element, 64, 8 << 20)
    memory = work.values.memory if element == "int4" else work.blocks.memory
    assert work.kv_bytes == memory.numel()
    assert work.table.numel() == len(work.table.unique()) == work.total_tokens // ops.BLOCK
    assert int(work.tokens.sum()) == work.total_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--isas", "sse9"], "no instruction set 'sse9'"),
        (["--dtypes", "int3"], "no dtype 'int3'"),
        (["--kernels", "matmul"], "no kernel 'matmul'"),
        (["--kernels", "attend", "--dtypes", "int4"], "attend takes no int4"),
        (["--groups", "1,x"], "--groups is '1,x'"),
        (["--groups", "0"], "--groups is '0'"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    done = coattn_lab("bench", "ops", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "hint: " in done.stderr


def test_an_arena_is_measured() -> None:
    alone = json.loads(coattn_lab("bench", "arena", "--gib", "0.02", "--no-torch", "--json").stdout)
    assert alone["arena_s"] > 0
    assert alone["torch_s"] is None
    assert alone["ratio"] is None
    done = coattn_lab("bench", "arena", "--gib", "0.02", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["arena_s"] > 0
    assert (result["not_registered"] is None) == (result["registered_bytes"] > 0)


def test_spread() -> None:
    assert spread([3000, 1000, 2000]) == {"median_us": 2.0, "p99_us": 2.0, "max_us": 3.0, "jobs": 3}


def test_disturbance_counts_what_happened_between() -> None:
    before = Disturbance.now()
    after = Disturbance.now()
    assert before.steal_ms >= 0
    assert after.since(before).involuntary_switches >= 0
    assert Disturbance(5.0, 7).since(Disturbance(2.0, 3)) == Disturbance(3.0, 4)
