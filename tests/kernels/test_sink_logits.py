"""Sinks of heads: one more term of every softmax, counted once, by attention and by what goes by its shares."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.dense import assert_as_exact, dense

from coattn.kernels.average import Average, attend_averaging
from coattn.kernels.merge import merge_output, with_sinks
from coattn.kernels.prefill import prefill
from coattn.parts.maintenance.weighing import weights_over
from coattn.state import AttnState
from coattn.types import BlockList, LayerShape

SHAPE = LayerShape(6, 2, 16, torch.float32, torch.device("cpu"), sink_logits=torch.linspace(-2, 5, 6))


def on(device: torch.device, **more: Any) -> LayerShape:
    assert SHAPE.sink_logits is not None
    return replace(SHAPE, device=device, sink_logits=SHAPE.sink_logits.to(device), **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_a_prompt_is_the_textbooks(device: torch.device, dtype: torch.dtype, window: int | None) -> None:
    shape = on(device, dtype=dtype, sliding_window=window)
    q, k, v = (torch.randn(70, heads, 16, device=device).to(dtype) for heads in (6, 2, 2))
    exact, rounded = (
        dense(q, k, v, 0.4, window=window, sink_logits=shape.sink_logits, dtype=each) for each in (torch.float64, dtype)
    )
    got = prefill(q, k, v, 0.4, shape)
    assert got.dtype == dtype
    assert_as_exact(got, exact, rounded)
    assert not torch.allclose(got.double(), dense(q, k, v, 0.4, window=window), atol=0.1)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_a_step_adds_them_once(device: torch.device, parts: int) -> None:
    q = torch.randn(3, 6, 16, device=device)
    states = [AttnState(torch.randn(3, 1, 6, 16, device=device), torch.randn(3, 1, 6, device=device)) for _ in range(5)]
    logits = on(device).sink_logits
    some = states[:parts]
    plain, got = merge_output(list(some), q), merge_output(list(some), q, logits)
    lse = torch.cat([state.lse for state in some], 1).logsumexp(1)
    torch.testing.assert_close(got, plain * (lse - logits).sigmoid()[..., None])
    rows = with_sinks(AttnState(plain, lse), torch.float32, logits)
    torch.testing.assert_close(rows.out, got)
    torch.testing.assert_close(rows.lse, torch.logaddexp(lse, logits.expand_as(lse)))


def test_weights_are_shares_beside_them(device: torch.device) -> None:
    """Of the queries of prompts, and of decode steps."""
    shape = on(device)
    q, blocks = torch.randn(1, 1, 6, 16, device=device), torch.randn(3, 2, 2, 8, 16, device=device)
    keys = blocks[:, :, 0].transpose(0, 1).flatten(1, 2)  # [kv_heads, 24, d]
    scores = torch.einsum("hgd,hnd->hgn", q.view(2, 3, 16), keys) * 0.4
    assert shape.sink_logits is not None
    wanted = torch.cat([scores, shape.sink_logits.view(2, 3, 1)], -1).softmax(-1)[..., :-1].sum(1)
    torch.testing.assert_close(weights_over(q[0], keys, 0.4, shape, lambda w: w.sum((0, 1))), wanted)
    table = torch.arange(3, dtype=torch.int32, device=device)[None, None]
    listed = BlockList(table, torch.tensor([[24]], dtype=torch.int32, device=device), 24)
    average = Average(torch.zeros(3, 2, 8, device=device), 0.0, 1.0, True, shape.sink_logits)
    attend_averaging(q, blocks, listed, 0.4, None, average)
    torch.testing.assert_close(average.values.transpose(0, 1).flatten(1), wanted, atol=1e-5, rtol=1e-4)
