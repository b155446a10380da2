"""An engine that cannot be opened leaves the model as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.small import small, tokenizer

import coattn
from coattn.engine.runner.runner import Runner
from coattn.errors import ConfigError
from coattn.hf.fuse.fusion import Fusion

pytest.importorskip("triton")


class Fused(Runner):
    """Joins the projections' weights, as the runner of captured steps does, also without a GPU."""

    def __init__(self, session: Any, runtime: Any, slots: int, *_: Any) -> None:
        super().__init__(session, runtime, slots)
        self.fusion = Fusion(session)

    def close(self) -> None:
        self.fusion.close()
        super().close()


def joined(model: Any) -> int:
    """Weights that share their memory with others."""
    found = [p.untyped_storage().data_ptr() for p in model.model.layers.parameters()]
    return len(found) - len(set(found))


def test_what_fails_after_the_weights_were_joined_parts_them_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("coattn.engine.runner.capture.choose_runner", Fused)
    model, given = small(), {"max_batch": 2, "max_length": 64, "disk": tmp_path}
    before = {name: p.clone() for name, p in model.named_parameters()}
    with coattn.LLM((small(), tokenizer()), "full", **given) as first:
        assert joined(first.model) > 0
        with pytest.raises(ConfigError, match="another engine"):
            coattn.LLM((model, tokenizer()), "full", **given)
    assert joined(model) == 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    coattn.LLM((model, tokenizer()), "full", **given).close()
