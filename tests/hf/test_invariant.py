"""Rows of a forward call that do not depend on each other: under Triton's interpreter without a GPU."""

from types import SimpleNamespace

import pytest
import torch
from tests.engine.small import DEVICE
from tests.hf.families import tiny
from torch import Tensor, nn

from coattn.errors import UnsupportedError
from coattn.hf.forward import Session
from coattn.hf.fuse.fusion import _decoding, _Pretend
from coattn.hf.invariant import check_modules, row_invariant
from coattn.hf.logits import head
from coattn.hf.quantised.module import PackedLinear

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
ROWS = 9


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "opt"])
@torch.no_grad()
def test_rows_have_the_same_bits_alone_and_together(family: str) -> None:
    model = tiny(family, DEVICE, torch.float32)
    ids, positions = torch.randint(0, 100, (ROWS,), device=DEVICE), torch.randint(0, 60, (ROWS,), device=DEVICE)
    with Session(model) as session:

        def run(at: slice) -> Tensor:
            count = len(ids[at])
            return head(model, session.hidden(_Pretend(), _decoding(count), ids[at], positions[at]))

        want = run(slice(None))
        with row_invariant(ROWS):
            whole = run(slice(None))
            alone = {i: run(slice(i, i + 1)) for i in (0, 4, 8)}
    assert all(torch.equal(whole[i : i + 1], own) for i, own in alone.items())
    torch.testing.assert_close(whole, want, atol=1e-4, rtol=1e-4)


def test_what_may_depend_on_the_batch_is_refused_by_name() -> None:
    x, square = torch.randn(3, 8, device=DEVICE), torch.randn(8, 8, device=DEVICE)
    for call, said in (
        (lambda: x.softmax(-1), "_softmax"),
        (lambda: x.sum(0), "sum"),
        (lambda: torch.bmm(x[None], x.T[None]), "bmm"),
        (lambda: x @ square, "mm"),  # weights that do not lie row after row
        (lambda: x.cumsum(-1), "cumsum"),
    ):
        with row_invariant(3), pytest.raises(UnsupportedError, match=said):
            call()


def test_modules_that_have_no_such_form_are_refused() -> None:
    check_modules(tiny("llama", "cpu", torch.float32))
    with pytest.raises(UnsupportedError, match="experts"):
        check_modules(tiny("qwen3_moe", "cpu", torch.float32))
    packed = PackedLinear.__new__(PackedLinear)
    nn.Module.__init__(packed)
    packed.__dict__["packed"] = SimpleNamespace()
    with pytest.raises(UnsupportedError, match="quantised weights"):
        check_modules(nn.Sequential(packed))
