"""A row that cannot be one CUDA graph says which part is the reason."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

import coattn
from coattn.cache.ledger import Ledger
from coattn.engine.runner.runner import Runner
from coattn.method.row import Method, compose
from coattn.method.table import METHODS, find_method
from coattn.step.runtime import Runtime
from coattn.types import LayerShape
from coattn_lab.bench.random_model import random_model

SHAPE = LayerShape(4, 2, 16, torch.float32, torch.device("cpu"))


def reason(method: str | Method, device: str = "cuda", **params: Any) -> str | None:
    runtime = Runtime([SHAPE, SHAPE], compose(find_method(method), **params), Ledger(), 1, None)
    runtime.layers = [replace(SHAPE, device=torch.device(device))] * 2  # asked as if the layers lay there
    found = runtime.uncaptured()
    runtime.release()
    return found


def test_rows_of_the_table_are_captured_or_name_their_part() -> None:
    reasons = {name: reason(name) for name in METHODS}
    assert {name for name, why in reasons.items() if why is not None} == {"oracle", "random"}
    assert reasons["oracle"] == "select 'oracle': its class says `capturable = False`"


def test_parameters_can_be_the_reason() -> None:
    assert reason("hcattention", block=12) == "cache 'values': block is 12, which is no power of two"


def test_a_machine_without_a_gpu_says_so() -> None:
    assert reason("full", device="cpu") == "the model is not on a GPU"
    with coattn.LLM((random_model("tiny", torch.device("cpu"), torch.float32), None), "full", max_length=64) as llm:
        report = llm.report()
    assert report["captured"] is False
    assert report["not_captured"] == "the model is not on a GPU"


@pytest.mark.gpu
def test_a_rule_that_is_not_captured_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "coattn"):
        model = random_model("tiny", torch.device("cuda"), torch.float32)
        with coattn.LLM((model, None), "oracle", max_length=64, budget=8) as llm:
            assert type(llm.runner) is Runner
            assert "select 'oracle'" in llm.report()["not_captured"]
    assert sum("select 'oracle'" in record.message for record in caplog.records) == 1
