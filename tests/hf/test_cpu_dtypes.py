"""A dtype that the CPU has no instructions for is said to be slow: in one line, once for each model."""

import logging
from pathlib import Path

import pytest
import torch
from tests.hf.families import tiny

import coattn
from coattn.hf import cpu_dtypes as slow

CPU, GPU = torch.device("cpu"), torch.device("cuda")
OLD, NEW, ARM_OLD, ARM_NEW = "avx2 avx512f f16c", "avx2 avx512f avx512_bf16", "fp asimd", "fp asimd asimdhp bf16"


@pytest.mark.parametrize(
    ("there", "bfloat16", "float16"),
    [(OLD, True, True), (NEW, False, True), ("amx_bf16 amx_fp16", False, False), (ARM_OLD, True, True),
     (ARM_NEW, False, False), ("", False, False)],
)  # fmt: skip
def test_slow_is_what_the_cpu_has_no_instructions_for(
    monkeypatch: pytest.MonkeyPatch, there: str, bfloat16: bool, float16: bool
) -> None:
    monkeypatch.setattr(slow, "cpu_words", lambda: frozenset(there.split()))
    found = [slow.is_slow(dtype, CPU) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert found == [bfloat16, float16, False]
    assert not any(slow.is_slow(dtype, GPU) for dtype in (torch.bfloat16, torch.float16, torch.float32))


@pytest.mark.parametrize(("label", "rest"), [("flags\t\t", "\nflags : other"), ("Features\t", ""), ("cpu", "")])
def test_the_words_are_those_of_the_first_core(tmp_path: Path, label: str, rest: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{label}: fpu bf16\n{rest}")
    expected = frozenset() if label == "cpu" else {"fpu", "bf16"}
    assert slow.cpu_words(str(tmp_path / "cpuinfo")) == expected
    assert slow.cpu_words(str(tmp_path / "nothing")) == frozenset()


def test_attach_and_an_engine_say_it_once_for_each_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow, "cpu_words", lambda: frozenset(OLD.split()))
    caplog.set_level(logging.WARNING, "coattn")
    for _ in range(2):
        model = tiny("llama").to(torch.bfloat16)
        caplog.clear()
        for _ in range(2):
            with coattn.attach(model, "full"):
                pass
        with coattn.LLM((model, None), "full", max_batch=1, max_length=64):
            pass
        (record,) = caplog.records
        assert "bfloat16" in record.getMessage()
        assert "float32" in record.getMessage()
        assert "\n" not in record.getMessage()


@pytest.mark.parametrize(("there", "dtype"), [(OLD, torch.float32), (NEW, torch.bfloat16)])
def test_nothing_is_said_of_float32_or_of_a_cpu_that_is_fast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, there: str, dtype: torch.dtype
) -> None:
    caplog.set_level(logging.WARNING, "coattn")
    monkeypatch.setattr(slow, "cpu_words", lambda: frozenset(there.split()))
    with coattn.attach(tiny("llama").to(dtype), "full"):
        assert not caplog.records
