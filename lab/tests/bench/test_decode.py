"""`bench decode` and `bench prefill` on a tiny model: every key that scripts rely on, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.tests.run import coattn_lab

from coattn.cache.layout.kept import KeptTokens
from coattn.kernels.prompt.mask import Mask, Shape
from coattn_lab.bench.decode import Bench, Case, Row, simulated
from coattn_lab.bench.prefill import floor_s, pairs
from coattn_lab.bench.random_model import random_model
from coattn_lab.bench.scout import driven

TINY = ("--shapes", "tiny", "--device", "cpu")


def test_what_is_assumed_or_driven_is_said() -> None:
    few = ("--context", "600", "--steps", "4", "--seconds", "0.1", "--kept", "0.1,0.3", "--change", "0.16", "--json")
    given = ("--set", "budget=128", "--set", "groups=8", "--set", "centroids=64", "--set", "window_blocks=1")
    done = coattn_lab("bench", "decode", *TINY, *few, *given, "--methods", "hgca,scout,hcattention,streaming")
    rows = {row["method"]: row for row in json.loads(done.stdout)["rows"]}
    lists = "assumed lists: 20.0% of DRAM's entries kept"
    assert rows["hgca"]["simulated"][2:] == [lists]
    assert rows["hcattention"]["simulated"][2:] == [lists]
    assert rows["hcattention"]["settings"]["tau"] == 1
    assert rows["hcattention"]["notes"]["group_width"] * 8 in (16, 32, 64, 128)
    assert rows["hgca"]["kept_share"] == pytest.approx(0.2)
    driven_picks = "driven picks: 16.0% of the blocks change in a step, 5% of the scores predicted wrongly"
    assert rows["scout"]["simulated"][2:] == [driven_picks]
    assert rows["streaming"]["simulated"][2:] == ["picks by random weights"]


def test_driven_picks_are_named_with_their_rates() -> None:
    case = driven(Case("scout", 1, 65536), 0.158, 0.05)
    assert simulated(case, exact=False)[2] == (
        "driven picks: 15.8% of the blocks change in a step, 5% of the scores predicted wrongly"
    )
    assert case.drift is not None
    assert case.drift.noise > 0


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Bench.run

    def cut_off(self: Bench, cases: list[Case], seconds: float) -> Iterator[Row]:
        yield from measured(self, cases[:1], seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "run", cut_off)
    target = tmp_path / "decode.json"
    few = ("--methods", "full,cpu", "--context", "100", "--steps", "4", "--seconds", "0.1")
    assert coattn_lab("bench", "decode", *TINY, *few, "--out", str(target)).returncode
    kept = json.loads(target.read_text())
    assert [row["method"] for row in kept["rows"]] == ["full"]
    assert kept["unfinished"]


def test_prefill_rows_say_how_close_they_are() -> None:
    size = ("--tokens", "600", "--chunk", "100", "--gpu-kv", "400KiB", "--methods", "offload,cpu")
    rows = json.loads(coattn_lab("bench", "prefill", *TINY, *size, "--dtype", "float32", "--json").stdout)["rows"]
    assert [(row["method"], row["chunk"]) for row in rows] == [("full", 100), ("offload", 100), ("cpu", 100)]
    for row in rows[1:]:
        assert row["kl"] < 1e-10
        assert row["gpu_kv_peak"] <= 400 << 10
        assert row["host_kv_peak"] > 0


def test_prompts_over_packed_weights_stand_beside_plain_ones() -> None:
    """Each model's answers are compared with its own."""
    size = ("--tokens", "200", "--chunk", "100", "--gpu-kv", "none", "--methods", "cpu", "--dtype", "float32")
    done = coattn_lab("bench", "prefill", "--shapes", "tiny,tiny:int4", *TINY[2:], *size, "--json")
    rows = json.loads(done.stdout)["rows"]
    wanted = [(shapes, method) for shapes in ("tiny", "tiny:int4") for method in ("full", "cpu")]
    assert [(row["shapes"], row["method"]) for row in rows] == wanted
    assert all(row["ratio"] == row["seconds"] / rows[0]["seconds"] for row in rows)
    assert all(row["kl"] < 1e-10 for row in rows)


def test_products_of_packed_weights_are_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coattn_lab.bench.prefill.product_tflops", lambda *_: 1e-6)
    monkeypatch.setattr("coattn_lab.bench.prefill._fastest", lambda _: 1e20)
    models = (random_model(shapes, torch.device("cpu"), torch.float32) for shapes in ("tiny", "tiny:int4"))
    plain, packed = (floor_s(model, 100) for model in models)
    assert plain > 0
    assert packed == pytest.approx(plain)


def test_pairs_of_a_query_and_a_key_are_counted() -> None:
    for mask in (Mask(), Mask(False), Mask(window=50), Mask(window=50, sinks=7), Mask(window=500, sinks=2)):
        for tokens, keys in ((9, 9), (9, 40), (60, 200), (150, 200)):
            position, key = torch.arange(keys - tokens, keys)[:, None], torch.arange(keys)
            seen = (key <= position) | (not mask.causal)
            if mask.over(keys).window is not None:
                seen = seen & ((key > position - (mask.window or 0)) | (key < mask.sinks))
            found = pairs(Shape(torch.device("cpu"), torch.float32, 1, 1, 1, tokens, keys, mask.over(keys)))
            # sinks inside the window are counted once more at most
            assert int(seen.sum()) <= found <= int(seen.sum()) + tokens * mask.sinks


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("decode", "--shapes", "huge"), "There is no folder huge"),
        (("decode", *TINY, "--methods", "best"), "no method 'best'"),
        (("decode", *TINY, "--batch", "none"), "--batch is 'none'"),
        (("decode", *TINY, "--set", "sinks=4"), "parameter 'sinks'"),
        (("decode", *TINY, "--gpu-kv", "much"), "--gpu-kv"),
        (("prefill", *TINY, "--tokens", "100", "--chunk", "none"), "is not a chunk"),
    ],
)
def test_bad_input_gets_one_sentence_and_a_hint(arguments: tuple[str, ...], said: str) -> None:
    done = coattn_lab("bench", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "hint:" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("more", [{}, {"host_dtype": "int8"}])
def test_auto_is_driven_to_fetch_so_many_tokens(more: dict[str, Any]) -> None:
    model = random_model("tiny", torch.device("cpu"), torch.float32)
    limits = {"hbm_gbps": None, "pcie_gbps": None, "dram_gbps": 10.0}
    params = {"pool_share": 0.1, "window_blocks": 2, **more}
    case = Case("auto", 2, 1400, params, fetched=40)
    (row,) = Bench(model, "tiny", limits, None, 6).run([case], 0.1)
    assert 20 <= row.notes["row_entries"] / 2 <= 60
    assert any("about 40 tokens fetched" in said for said in row.simulated)
    assert row.settings["audit"] is False


@pytest.mark.parametrize(
    ("method", "params", "stay"), [("h2o", {"heavy": 32, "recent": 32}, 64), ("tova", {"cache_size": 48}, 48)]
)
def test_rows_that_drop_entries_begin_with_what_stays(method: str, params: dict[str, int], stay: int) -> None:
    model = random_model("tiny", torch.device("cpu"), torch.float32)
    bench = Bench(model, "tiny", {"hbm_gbps": 10, "pcie_gbps": 10, "dram_gbps": 10}, None, 4)
    with bench.prepared(Case(method, 3, 400, {**params, "block": 32})) as ready:
        gpu = ready.runtime.groups[0].cache.gpu
        assert isinstance(gpu, KeptTokens)
        assert [gpu.count(slot) for slot in range(3)] == [stay] * 3
        ready.step()
