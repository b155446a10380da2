"""Prompts read block by block: what each token sees, however the prompt is cut."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.kernels.blockwise import Blockwise, Prompt
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

SHAPE = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))


def textbook(q: Tensor, k: Tensor, v: Tensor, block: int, anchor: int, softcap: float | None = None) -> Tensor:
    scores = torch.einsum("thd,nhd->htn", q.double(), k.double().repeat_interleave(2, 1)) * 0.25
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(q))
    seen = (at[None] <= at[:, None]) & ((at[None] // block == at[:, None] // block) | (at[None] < anchor))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, v.double().repeat_interleave(2, 1))


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("cuts", [[150], [64, 64, 22], [1, 30, 100, 19], [40, 110]])
@pytest.mark.parametrize(("block", "anchor"), [(64, 64), (64, 10), (32, 0), (200, 200), (150, 7)])
def test_a_token_sees_its_block_and_the_anchor(block: int, anchor: int, cuts: list[int], softcap: float | None) -> None:
    shape = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"), softcap=softcap)
    q, k, v = (torch.randn(150, heads, 16) for heads in (4, 2, 2))
    prompt, start, outs = Prompt(Blockwise(block, anchor)), 0, []
    for cut in cuts:
        outs.append(prompt.attend(q[start : start + cut], k[start : start + cut], v[start : start + cut], 0.25, shape))
        start += cut
    wanted = textbook(q, k, v, block, anchor, softcap)
    torch.testing.assert_close(torch.cat(outs).double(), wanted, atol=2e-5, rtol=1e-4)


def in_steps(runtime: Runtime, cuts: Sequence[int], qkv: Sequence[Tensor], more: bool = False) -> list[Tensor]:
    """more: the first step is not the end of its prompt."""
    outs, start = [], 0
    for cut in cuts:
        step = Step.of((0,), (start,), (cut,))
        running = runtime.begin(replace(step, more=frozenset({0} if more and not start else ())))
        outs.append(runtime.attend(running, 0, *(x[start : start + cut] for x in qkv), 0.25))
        runtime.commit(running)
        start += cut
    return outs


@pytest.mark.parametrize("method", ["full", "cpu", "hcattention"])
def test_every_method_takes_it_and_decodes_over_everything(method: str) -> None:
    extra: dict[str, Any] = {"groups": 0, "tau": 1} if method == "hcattention" else {}
    composed = compose(METHODS[method], block=8, prefill_block=32, anchor=16, question=20, **extra)
    assert not composed.exact
    assert composed.params["prefill_block"] == 32
    runtime = Runtime([SHAPE], composed, Ledger(), 1, None)
    q, k, v = (torch.randn(101, heads, 16) for heads in (4, 2, 2))
    outs = in_steps(runtime, (50, 50, 1), (q, k, v), more=True)
    wanted = textbook(q[:100], k[:100], v[:100], 32, 16)
    wanted[80:] = textbook(q, k, v, 101, 0)[80:100]
    torch.testing.assert_close(torch.cat(outs[:2]).double(), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(outs[2].double(), textbook(q, k, v, 101, 0)[100:], atol=2e-5, rtol=1e-4)
    assert not runtime.prompts.blockwise_prompts


def test_a_later_turn_sees_everything() -> None:
    runtime = Runtime([SHAPE], compose(METHODS["full"], prefill_block=16), Ledger(), 1, None)
    q, k, v = (torch.randn(90, heads, 16) for heads in (4, 2, 2))
    outs = in_steps(runtime, (40, 1, 49), (q, k, v))
    torch.testing.assert_close(outs[2].double(), textbook(q, k, v, 90, 0)[41:], atol=2e-5, rtol=1e-4)
