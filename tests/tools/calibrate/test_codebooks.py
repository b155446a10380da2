"""Codebook files: made by the command, read back, refused where they do not belong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.run import coattn
from tests.engine.small import small
from tests.tools.evaluate.tiny import save_model

from coattn.errors import ConfigError
from coattn.hf.architectures import describe_layers
from coattn.kernels.quantise.file import Origin, load, read_origin, save
from coattn.tools.calibrate.codebooks import choose_samples, collect, fit_layers


def make(path: Path, seed: int = 0) -> None:
    model = small(seed=seed)
    keys = collect(model, [torch.arange(60) % 250, torch.arange(40) * 3 % 250])
    assert [tuple(each.keys.shape) for each in keys] == [(100, 2, 8)] * 2
    marks = tuple(shape.mark for shape in describe_layers(model))
    save(path, fit_layers(keys, 4, 16, seed=0), Origin("small", "t", "0", 4, 16, True, 8, marks))


def test_keys_are_those_that_the_model_attends_to() -> None:
    model, ids = small(), torch.arange(50) % 250
    keys = collect(model, [ids])
    with torch.inference_mode():
        cache = model(ids[None].to(model.device), use_cache=True).past_key_values
    for layer, found in enumerate(keys):
        own = cache.layers[layer].keys[0].transpose(0, 1)
        torch.testing.assert_close(found.keys, own.cpu(), atol=1e-5, rtol=1e-4)


def test_samples_do_not_overlap() -> None:
    found = choose_samples(torch.arange(1000), 3, 200, seed=1)
    assert [len(each) for each in found] == [200] * 3
    assert len(torch.cat(found).unique()) == 600
    assert [len(each) for each in choose_samples(torch.arange(50), 3, 200, seed=1)] == [50]


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "book.safetensors"
    make(path)
    shapes = describe_layers(small())
    books = load(str(path), dict(enumerate(shapes)))
    assert read_origin(str(path)).model == "small"
    assert [book.centroids.shape for book in books.values()] == [(1, 16, 2)] * 2
    assert all(book.centroids.dtype == shapes[0].dtype for book in books.values())
    assert read_origin(str(path)).basis
    for book in books.values():
        assert book.basis.to.shape == (2, 8, 8)
        same = torch.eye(8).expand(2, 8, 8)
        torch.testing.assert_close(book.basis.to @ book.basis.back, same, atol=1e-3, rtol=0)
    for dtype in (torch.bfloat16, torch.float16):
        layers = dict(enumerate(describe_layers(small().to(dtype))))
        assert load(str(path), layers)[1].centroids.dtype == dtype


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "book.safetensors"
    make(path)
    shapes = describe_layers(small())
    for other in (
        describe_layers(small(seed=1)),
        [replace(shape, head_dim=16) for shape in shapes],
        [*shapes, *shapes],
    ):
        with pytest.raises(ConfigError, match=r"was made for small .2 layers, head size 8., not for the model in use"):
            load(str(path), dict(enumerate(other)))


def test_what_is_not_a_codebook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no codebook"):
        read_origin(str(tmp_path / "absent"))
    (tmp_path / "text").write_text("not a codebook")
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot be read as a codebook"):
        read_origin(str(tmp_path / "text"))
    with pytest.raises(ConfigError, match="is not a codebook"):
        read_origin(str(tmp_path / "other"))


def test_the_command_writes_a_codebook(tmp_path: Path) -> None:
    model, text, target = save_model(tmp_path / "model"), tmp_path / "text", tmp_path / "out" / "book"
    text.write_text("How much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 8)
    command = ["calibrate", "hcattention", "--model", model, "--text", str(text), "--out", str(target), "--json"]
    done = coattn(*command, "--groups", "4", "--centroids", "64", "--length", "128", "--samples", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["groups"], found["centroids"], found["tokens"]) == (4, 64, 256)
    assert all(0 < lost < 0.1 for lost in found["relative_error"])
    origin = read_origin(str(target))
    assert (origin.text, origin.length, origin.samples, origin.shared) == ("text", 128, 2, True)
    refused = coattn(*command, "--centroids", "30000")
    assert "too few tokens" in refused.stderr
