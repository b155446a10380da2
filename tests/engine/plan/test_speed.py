"""What a step would take: bytes that are counted here by hand, over the rates given."""

from __future__ import annotations

import json

import pytest
import torch
from tests.cli.run import coattn

from coattn.auto.maintenance import pool_tokens
from coattn.engine.plan.speed import CHOSEN, Rates, entries, step
from coattn.method.row import compose
from coattn.method.table import METHODS
from coattn.types import LayerShape

LAYERS = [LayerShape(8, 2, 64, torch.bfloat16, torch.device("meta"))] * 3
TOKEN = 3 * 2 * 2 * 64 * 2


def test_full_reads_weights_and_everything() -> None:
    found = step(LAYERS, compose(METHODS["full"]), 4, 1000, 10**6, Rates(1e9, 1e9))
    assert found is not None
    assert found["kv_bytes"] == 4 * 1000 * TOKEN
    assert found["ms"] == pytest.approx(1e3 * (10**6 + 4000 * TOKEN) / 1e9)


def test_auto_reads_sketches_window_and_chosen_rows() -> None:
    composed = compose(METHODS["auto"], block=32, window_blocks=4, code_bytes=16, quality=0.98)
    found = step(LAYERS, composed, 4, 20000, 10**6, Rates(1e12, 1e9))
    assert found is not None
    # of a pool in 8 bits 4,096 rows: a byte a channel, two scales of two bytes, and a place in a list
    assert found["kv_bytes"] == 4 * (128 * TOKEN + 4096 * 3 * 2 * (2 * 64 + 6))
    assert found["scan_bytes"] == 4 * (20000 - 128) * 3 * 2 * 16
    assert found["entries"] == 1780
    assert found["pulled_bytes"] == pytest.approx(4 * 0.0075 * 1780 * TOKEN, abs=1)
    own = 1e3 * (10**6 + found["kv_bytes"] + found["scan_bytes"] / 0.7) / 1e12
    late = 1e3 * 0.37 * found["pulled_bytes"] / 1e9
    assert found["ms"] == pytest.approx(max(own + late, late / 0.37))
    assert step(LAYERS, compose(METHODS["scout"]), 4, 20000, 10**6, Rates()) is None
    packed = step(LAYERS, compose(METHODS["auto"], host_dtype="int8"), 4, 20000, 10**6, Rates(1e12, 1e9))
    assert packed is not None
    assert packed["pulled_bytes"] == pytest.approx(found["pulled_bytes"] / LAYERS[0].dtype.itemsize, abs=1)


def test_a_pool_is_half_of_a_sequence_up_to_a_length() -> None:
    pools = [pool_tokens(n, None, "model") for n in (100, 2000, 4096, 8192, 20000, 100_000)]
    assert pools == [50, 1000, 2048, 4096, 8192, 8192]
    assert pool_tokens(4096, 0.25, "int8") == 1024
    assert [pool_tokens(n, None, "int8") for n in (20000, 100_000)] == [10000, 16384]


def test_entries_go_through_what_was_measured_and_have_limits() -> None:
    for floor, count in CHOSEN:
        assert entries(floor, 1 << 20) == pytest.approx(count)
    assert entries(1e-4, 500) == 500
    assert entries(0.0, 7777) == 7777
    counts = [entries(10.0**-x, 1 << 24) for x in range(2, 7)]
    assert counts == sorted(counts)
    assert all(count <= 10.0**x for x, count in zip(range(2, 7), counts, strict=True))


def test_plan_says_which_method_would_be_taken() -> None:
    shown = ("plan", "--shapes", "llama-3-8b", "--context", "100000", "--json", "--gpu-memory")
    assert json.loads(coattn(*shown, "24GiB").stdout)["taken"] == "auto"
    found = json.loads(coattn(*shown, "80GiB", "--method", "auto").stdout)
    assert found["taken"] == "full"
    assert found["step"]["pulled_bytes"] > 0
