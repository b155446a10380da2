"""Fused forms of whole models, under Triton's interpreter without a GPU: the same numbers, and the model as it was."""

from __future__ import annotations

import pytest
import torch
from tests.hf.families import FAMILIES, tiny

from coattn.hf.forward import Session
from coattn.hf.fuse import Fusion
from coattn.hf.fuse.fusion import _Pretend

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WHOLE = {"llama", "qwen2", "qwen2_sliding", "qwen3", "mistral", "mistral_sliding"}
"""Families whose layers are of the common kind."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_gives_the_same_numbers(family: str) -> None:
    model = tiny(family, DEVICE)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    ids, positions = torch.randint(3, 160, (5,), device=DEVICE), torch.arange(5, device=DEVICE)
    with Session(model) as session:
        want = session.hidden(_Pretend(), ids, positions)
        fusion = Fusion(session)
        assert fusion.summary.get("layers", 0) == (3 if family in WHOLE else 0)
        with fusion.active(), torch.no_grad():
            got = session.hidden(_Pretend(), ids, positions)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        fusion.close()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
