"""Two steps that run at once: a prompt's, and a decode step of another sequence at its layer boundaries."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coattn.cache.ledger import Ledger
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.step.runtime import Runtime
from coattn.types import LayerShape, Step

LAYERS = 3
SHAPE = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))
ROWS = {"full": {"block": 8}, "cpu": {"block": 8, "window_blocks": 2}, "scout": {"block": 8, "budget": 48}}


def drawn(seed: int, tokens: int) -> list[list[Tensor]]:
    """Queries, keys and values of every layer."""
    draws = torch.Generator().manual_seed(seed)
    return [[torch.randn(tokens, heads, 16, generator=draws) for heads in (4, 2, 2)] for _ in range(LAYERS)]


def run(runtime: Runtime, step: Step, made: list[list[Tensor]], **more: Any) -> Tensor:
    running = runtime.begin(step, **more)
    outs = [runtime.attend(running, layer, *each, 0.25) for layer, each in enumerate(made)]
    runtime.commit(running)
    return torch.stack(outs)


def start(row: str) -> Runtime:
    """Sequence 0 has 60 tokens, sequence 1 none."""
    runtime = Runtime([SHAPE] * LAYERS, compose(METHODS[row], **ROWS[row]), Ledger(), 2, 256)
    run(runtime, Step.of((0,), (0,), (60,)), drawn(1, 60))
    return runtime


def decode(runtime: Runtime, i: int) -> Tensor:
    return run(runtime, Step.of((0,), (60 + i,), (1,)), drawn(10 + i, 1))


@pytest.mark.parametrize("row", ROWS)
def test_a_decode_step_at_each_layer_boundary_changes_neither(row: str) -> None:
    inside, apart = start(row), start(row)
    found: list[Tensor] = []
    prompt = Step.of((1,), (0,), (40,))
    read = run(inside, prompt, drawn(2, 40), on_layer_boundary=lambda: found.append(decode(inside, len(found))))
    assert len(found) == LAYERS - 1
    assert torch.equal(read, run(apart, prompt, drawn(2, 40)))
    for i, out in enumerate(found):
        assert torch.equal(out, decode(apart, i))
    after = Step.of((0, 1), (62, 40), (1, 1))
    assert torch.equal(run(inside, after, drawn(3, 2)), run(apart, after, drawn(3, 2)))
    inside.release()
    apart.release()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("fails", ["prompt", "decode"])
def test_one_of_two_running_steps_is_given_up(row: str, fails: str) -> None:
    """The other one, and what is stored of its sequence, are as if it had run by itself."""
    both, alone = start(row), start(row)
    decoded: list[Tensor] = []

    def boundary() -> None:
        if fails == "prompt":
            decoded.append(decode(both, len(decoded)))
            return
        running = both.begin(Step.of((0,), (60,), (1,)))
        both.attend(running, 0, *drawn(10, 1)[0], 0.25)
        both.abort(running)

    prompt, made = Step.of((1,), (0,), (40,)), drawn(2, 40)
    running = both.begin(prompt, on_layer_boundary=boundary)
    read = [both.attend(running, layer, *made[layer], 0.25) for layer in range(2 if fails == "prompt" else LAYERS)]
    if fails == "prompt":
        both.abort(running)
        assert torch.equal(decoded[0], decode(alone, 0))
        again = run(both, prompt, made)
        assert torch.equal(again, run(alone, prompt, made))
    else:
        both.commit(running)
        assert torch.equal(torch.stack(read), run(alone, prompt, made))
        assert torch.equal(decode(both, 0), decode(alone, 0))
    assert not both.torn
    both.release()
    assert both.ledger.held == {"gpu": 0, "host": 0}
    alone.release()
