"""Every Triton kernel compiles for every card, and fits it, also where there is none."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kernels.cards import CARDS, REGISTERS, SHARED

pytest.importorskip("triton")
from tests.kernels.triton.compile_all import KERNELS

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (ROOT / "src/coattn/kernels/triton", ROOT / "lab/coattn_lab/bench")

Compile = Callable[[int, int], dict[str, Any]]


@pytest.fixture(scope="module")
def compile_kernel() -> Iterator[Compile]:
    """Number of a kernel, card -> what it takes. In a process of its own, where Triton's interpreter is off."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "lab"), os.environ.get("PYTHONPATH", "")])
    compiler = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.compile_all"],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    into, out = compiler.stdin, compiler.stdout

    def ask(number: int, card: int) -> dict[str, Any]:
        print(number, card, file=into, flush=True)
        return json.loads(out.readline())

    yield ask
    into.close()
    assert compiler.wait(60) == 0


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("number", range(len(KERNELS)), ids=[f"{i}{k.fn.__name__}" for i, (k, _) in enumerate(KERNELS)])
def test_a_kernel_fits_a_card(number: int, card: int, compile_kernel: Compile) -> None:
    made = compile_kernel(number, card)
    assert "error" not in made, made
    assert made["shared"] <= SHARED[card]
    assert made["registers"] * made["threads"] <= REGISTERS


def test_every_kernel_compiles(compile_kernel: Compile) -> None:
    """In one of its forms; in all of them on demand."""
    one_each = {kernel.fn.__name__: n for n, (kernel, _) in enumerate(KERNELS)}.values()
    numbers = range(len(KERNELS)) if os.environ.get("COATTN_EVERY") else one_each
    failed = {n: made for n in numbers if "error" in (made := compile_kernel(n, 90))}
    assert not failed


def test_every_kernel_is_here() -> None:
    """Whatever the launchers start with `_name[grid](..)`."""
    texts = [path.read_text() for folder in FOLDERS for path in folder.glob("*.py")]
    launched = {name for text in texts for name in re.findall(r"^ +(_[a-z_]+)\[[^\n]*\]\($", text, re.MULTILINE)}
    launched |= {name for text in texts for name in re.findall(r"^ +(_[a-z_]+)\[\(1,\)\]\(", text, re.MULTILINE)}
    assert len(launched) > 35
    assert launched <= {kernel.fn.__name__ for kernel, _ in KERNELS}
