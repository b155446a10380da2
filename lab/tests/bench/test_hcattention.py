"""The paper's tables as commands: rows that resume one prefill give what a run of their own gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lab.tests.run import coattn_lab
from tests.engine.small import small
from tests.tools.evaluate.tiny import save_model

from coattn.tools.evaluate.forced import force
from coattn_lab.bench.hcattention import TABLES, book_name
from coattn_lab.evaluate.resumed import prefill_once, resume

IDS = torch.randint(0, 250, (150,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("method", "params"),
    [("full", {}), ("hcattention", {"groups": 0, "tau": 0.8}), ("hcattention", {"groups": 2, "centroids": 16})],
)
def test_resuming_is_running(method: str, params: dict[str, object]) -> None:
    model = small()
    own, shares = resume(model, prefill_once(model, IDS, 130), method, **params)
    whole = force(model, IDS, 130, method, **params)
    torch.testing.assert_close(own.logits, whole.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(own.losses, whole.losses[130:], atol=1e-5, rtol=1e-5)
    assert own.report == whole.report
    assert len(shares) == 2
    assert all(share == 1 for share in shares) == (method == "full")


def test_rows_name_the_codebooks_that_keep_the_papers_bits() -> None:
    books = {book_name(row.book) for make in TABLES.values() for row in make(128) if row.book}
    assert {"groups64_centroids8192.safetensors", "groups32_centroids8192.safetensors"} <= books
    assert "groups64_centroids8192_separate.safetensors" in books


def test_the_command_measures_thresholds(tmp_path: Path) -> None:
    text, model = tmp_path / "text", save_model(tmp_path / "model")
    text.write_text("How much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 4)
    target = tmp_path / "3.json"
    command = ["bench", "hcattention", "--model", model, "--text", str(text), "--length", "200", "--decode", "20"]
    done = coattn_lab(*command, "--table", "3", "--out", str(target), "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    attended = [row["share_attended"] for row in rows]
    assert attended == sorted(attended)
    assert attended[-1] == 1
    assert rows[-1]["against_full"]["ratio"] == pytest.approx(1, abs=1e-4)
    assert rows[-1]["kl"] < 1e-6 < rows[0]["kl"]
    again = coattn_lab(*command, "--table", "3", "--out", str(target))
    assert "tau 0.3" in again.stdout
    refused = coattn_lab(*command, "--table", "budgets")
    assert refused.returncode == 2
    assert "lacks groups2_centroids8192" in refused.stderr
