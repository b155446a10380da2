"""The benchmark's own arithmetic. Speed is never tested, only that what is reported is what was done."""

from __future__ import annotations

import pytest
import torch
from lab.tests.run import coattn_lab

from coattn.kernels.quantise.values import ValueBlocks
from coattn_lab.bench import ops
from coattn_lab.bench.timing import in_turn


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
