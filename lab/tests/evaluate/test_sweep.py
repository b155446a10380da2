"""`coattn-lab eval sweep`: rows and their alternatives, full attention as the measure, runs that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab.tests.run import coattn_lab
from tests.tools.evaluate.tiny import model_and_text

from coattn.cli.options import parse_settings
from coattn.errors import ConfigError, MethodError
from coattn_lab.evaluate.sweep import expand

SIZE = ["--prefill", "120", "--decode", "8", "--length", "128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_and_text(tmp_path_factory.mktemp("model"))


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    where = ["--model", str(folder), "--text", str(folder / "text.txt"), *SIZE]
    done = coattn_lab("eval", "sweep", *arguments, *where, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_alternatives_are_all_run() -> None:
    rows = expand("hgca,beta=0.5|1,window_blocks=2|3", parse_settings)
    assert [row.name for row in rows] == [f"hgca,beta={b},window_blocks={w}" for b in ("0.5", "1") for w in (2, 3)]
    assert [row.composed.params["beta"] for row in rows] == [0.5, 0.5, 1, 1]
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        expand("hgca,beta", parse_settings)
    with pytest.raises(MethodError, match="no method"):
        expand("nothing", parse_settings)


def test_exact_rows_have_a_ratio_of_one_and_others_say_what_they_keep(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "sweep.json"
    rows = ["full", "hgca,beta=0|1,window_blocks=1,block=8,peak=false", "streaming,recent=16,sinks=0"]
    found = {row["row"]: row for row in run(folder, *rows, "--out", str(target))["rows"]}
    full, exact, lossy, recent = found.values()
    assert full["ratio"] == 1.0
    assert full["kl"] == 0.0
    assert exact["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert exact["attended_gpu"] + exact["attended_host"] == 128
    assert exact["kept_lowest"] == exact["kept_highest"] == 1.0
    assert 0 < lossy["kept_mean"] < 1
    assert lossy["attended_host"] < exact["attended_host"]
    assert recent["attended_gpu"] == 16
    assert lossy["context_bytes"] < exact["context_bytes"]
    again = run(folder, *rows, "--out", str(target))
    assert again["rows"] == list(found.values())


def test_rows_are_sized_to_a_share_of_the_kv_and_calibrated(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "sweep.json"
    rows = ["hgca,block=8", "auto,block=8,pool_share=0.25", "hcattention,block=8,centroids=16", "full"]
    found = run(folder, *rows, "--budget", "40%,80%", "--like", "hgca,block=8,window_blocks=3", "--out", str(target))
    found = found["rows"]
    methods = ["hgca", "hgca", "hgca", "hgca", "auto", "hcattention", "hcattention", "hcattention", "full"]
    assert [row["method"] for row in found] == methods
    model, small, large, same, given, *coded, full = found
    assert same["params"] == model["params"]
    assert same["gpu_share"] == model["gpu_share"]
    assert [small["budget"], large["budget"], given["budget"], full["budget"]] == [0.4, 0.8, None, None]
    assert small["params"]["window_blocks"] < large["params"]["window_blocks"]
    for row in (small, large, *coded):
        assert row["gpu_share"] <= row["budget"] or row["budget_why"]
    for row in (small, large):  # planned as it is taken, but for 16 bits
        assert row["gpu_share"] == pytest.approx(row["gpu_kv_bytes"] / full["gpu_kv_bytes"], rel=0.1)
    assert given["params"]["pool_share"] == 0.25
    # of the KV in 16 bits, and with a pool whose books take what they take
    assert given["gpu_share"] * full["gpu_kv_bytes"] / 2 <= given["gpu_kv_bytes"]
    assert all(row["kl_95"][0] <= row["kl"] <= row["kl_95"][1] for row in found)
    assert list((tmp_path / "sweep_calibrated").iterdir())


def test_rows_stand_beside_full_in_8_and_4_bits_at_its_bytes(folder: Path) -> None:
    """Keys of 8 channels take 16 and 12 bytes, of 16."""
    found = run(folder, "hgca,block=8", "cpu,block=8", "--like", "full,gpu_dtype=int8|int4,block=8")["rows"]
    wide, narrow, *others = found
    assert [row["params"]["gpu_dtype"] for row in (wide, narrow)] == ["int8", "int4"]
    assert (wide["gpu_share"], narrow["gpu_share"]) == (1.0, 0.75)
    assert 0 < wide["kl"] < narrow["kl"]
    assert [(row["method"], row["budget"]) for row in others] == [(x, y) for x in ("hgca", "cpu") for y in (1.0, 0.75)]
    for row in others:
        assert row["gpu_share"] <= row["budget"]
        assert row["gpu_share"] == pytest.approx(row["budget"], rel=0.2)
