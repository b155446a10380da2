"""Weights from codes beside weights from keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.cli.run import coattn
from tests.engine.small import small
from tests.evaluate.tiny import save_model

from coattn.calibrate.codebooks import collect, fit_layers
from coattn.evaluate.codes import compare_codes
from coattn.hf.architectures import describe_layers
from coattn.quantise.file import Origin, save


def make(path: Path, ids: torch.Tensor, count: int) -> str:
    model = small()
    marks = tuple(shape.mark for shape in describe_layers(model))
    books = fit_layers(collect(model, [ids]), 2, count, shared=True, seed=0)
    save(path, books, Origin("small", "t", "0", 2, count, True, 8, marks))
    return str(path)


def test_weights_move_less_with_more_centroids_and_not_at_all_with_enough(tmp_path: Path) -> None:
    ids = torch.randint(0, 250, (90,), generator=torch.Generator().manual_seed(0))
    few, many, all_of_them = (
        compare_codes(small(), ids, make(tmp_path / str(count), ids, count))["moved"] for count in (4, 64, 400)
    )
    assert sum(few) > sum(many) > 0
    assert max(all_of_them) == pytest.approx(0, abs=1e-5)  # 90 tokens x 2 heads x 2 pieces: each its own centroid


def test_the_command_draws_four_layers(tmp_path: Path) -> None:
    model, text, target = save_model(tmp_path / "model"), tmp_path / "text", tmp_path / "codes.json"
    text.write_text("How much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 2)
    book = make(tmp_path / "book", torch.arange(100), 32)
    command = ["eval", "codes", "--model", model, "--text", str(text), "--codebook", book, "--length", "100"]
    done = coattn(*command, "--out", str(target), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["moved"]) == len(found["correlation"]) == 2
    assert all(0 < moved < 1 for moved in found["moved"])
    assert target.with_suffix(".png").stat().st_size > 5000
    assert "of the mass lies elsewhere" in coattn(*command).stdout
