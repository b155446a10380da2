"""Fused steps of modules with a state: what Transformers' own modules compute, and leave behind."""

from typing import Any

import pytest
import torch
from tests.hf.test_table import small

from coattn.cache.ledger import Ledger
from coattn.cache.states import StateStore
from coattn.hf.forward import Session
from coattn.hf.fuse.fusion import Fusion, _Pretend
from coattn.kernels import delta_rule
from coattn.step.running import RunningStep
from coattn.types import Phase, Step

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEQS, STEPS = 2, 2
DECODE = Step(Phase.DECODE, tuple(range(SEQS)), (5,) * SEQS, (1,) * SEQS)
HYBRIDS = {"qwen3_5_text": 2, "qwen3_5_moe_text": 2, "qwen3_next": 0, "nemotron_h": 0}
"""Mixers whose steps have a fused form."""


def steps(session: Session) -> list[torch.Tensor]:
    """A few decode steps, each from the states that the one before has left: their outputs and the states after."""
    states = StateStore(session.states, SEQS, Ledger(), padding=True, keeps=False)
    for i, x in enumerate(states.tensors.values()):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)))
    nobody: Any = None
    running, found = RunningStep(DECODE, nobody, nobody, eager=False), []
    for i in range(STEPS):
        states.plan(DECODE.slots)
        ids = torch.tensor([7 + i, 90 - i], device=DEVICE)
        found.append(session.hidden(_Pretend(states), running, ids, torch.tensor([5, 9], device=DEVICE) + i))
        states.commit(DECODE)
    return [*found, *(x[: 2 * SEQS].clone() for x in states.tensors.values())]


@pytest.mark.parametrize("family", HYBRIDS)
def test_fused_steps_of_a_hybrid_give_the_same_numbers(family: str) -> None:
    model = small(family, 0).to(DEVICE)
    with Session(model) as session, torch.no_grad():
        want = steps(session)
        fusion = Fusion(session)
        states = StateStore(session.states, 1, Ledger(), padding=True, keeps=False)
        assert fusion.summary.get("mixers", 0) == HYBRIDS[family]
        assert fusion.waits(states) is None
        with fusion.active():
            got = steps(session)
        again = steps(session)
        fusion.close()
    for each, other, last in zip(got, want, again, strict=True):
        torch.testing.assert_close(each, other, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(last, other, atol=2e-4, rtol=1e-3)


def test_the_reference_is_what_transformers_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the kernel would be held against something else."""
    monkeypatch.setattr("coattn.kernels.triton.delta_rule.delta_rule", delta_rule.delta_rule.reference)
    with Session(small("qwen3_5_text", 0).to(DEVICE)) as session:
        fusion = Fusion(session)
        assert fusion.summary["mixers"] == 2
        fusion.close()
        monkeypatch.setattr("coattn.kernels.delta_rule.NORM_EPS", 0.5)
        fusion = Fusion(session)
        assert "mixers" not in fusion.summary
        fusion.close()


def test_states_in_float32_of_a_model_in_bfloat16_have_a_fused_step() -> None:
    """What goes into them is rounded to bfloat16, by another product in another place."""
    with Session(small("qwen3_5_text", 0).bfloat16().to(DEVICE)) as session:
        fusion = Fusion(session)
        assert fusion.summary["mixers"] == 2
        fusion.close()
