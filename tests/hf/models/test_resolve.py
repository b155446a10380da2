"""Names: the catalog's, local folders and what is wrong with them, hub names."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coattn.errors import ModelError
from coattn.folders import cache_dir
from coattn.hf.models import Embedded, list_models, resolve
from coattn.hf.models.resolve import check_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(64)}, path / "model.safetensors")
    return path


def test_a_model_folder_is_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(folder)) == folder
    assert resolve(folder) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve("model") == Path("model")


def test_a_sharded_folder_needs_every_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks two\.safetensors"):
        resolve(folder)
    save_file({"b": torch.zeros(1)}, folder / "two.safetensors")
    assert resolve(folder) == folder


@pytest.mark.parametrize("name", ["someone/some-model", "gpt2", "Owner/Model-1.5B_x"])
def test_anything_else_is_a_hub_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve(name) == name


@pytest.mark.parametrize("name", ["./model", "/no/such/folder", "a/b/c", "~/no-such-folder", "", "a b", "../x"])
def test_a_path_that_is_not_there_is_no_hub_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve(name)
    assert "smollm2" in caught.value.hint


def test_a_path_object_is_never_a_catalog_or_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "gpt2"):
        with pytest.raises(ModelError, match="There is no model folder"):
            resolve(Path(name))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


BROKEN = {
    "has no config.json": lambda f: (f / "config.json").unlink(),
    "config.json is not valid JSON": lambda f: (f / "config.json").write_text("{"),
    "config.json is not a JSON object": lambda f: (f / "config.json").write_text("[]"),
    "does not name a model_type": lambda f: (f / "config.json").write_text("{}"),
    "text_config in": lambda f: (f / "config.json").write_text('{"model_type": "llama", "text_config": "llama"}'),
    "layer_types in": lambda f: (f / "config.json").write_text('{"model_type": "llama", "layer_types": 5}'),
    "has no weights in safetensors": lambda f: (f / "model.safetensors").unlink(),
    "holds pickled weights only": lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
    "has no tokenizer": lambda f: (f / "tokenizer.json").unlink(),
    "not fully covered": lambda f: cut(f / "model.safetensors", -1),
    "is truncated or not": lambda f: cut(f / "model.safetensors", 20),
    "header too small": lambda f: (f / "model.safetensors").write_bytes(b""),
    "is truncated or not a": lambda f: (f / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[["),
    "is truncated or not a safetensors file": lambda f: (f / "model.safetensors").open("ab").write(b"x"),
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_folder_says_what_is_wrong(folder: Path, said: str) -> None:
    BROKEN[said](folder)
    with pytest.raises(ModelError) as caught:
        resolve(folder)
    assert said in caught.value.sentence
    assert caught.value.hint


def test_a_file_is_not_a_model_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file, not a model folder"):
        resolve(folder / "config.json")


@pytest.mark.parametrize("locked", [".", "config.json", "model.safetensors"])
def test_an_unreadable_folder_says_so(folder: Path, locked: str) -> None:
    """In a child that gives up root where it has it: root may read everything."""
    shared = Path(tempfile.gettempdir())
    for path in (folder, *folder.parents):
        if path.is_relative_to(shared) and path != shared:
            path.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)
    (folder / locked).chmod(0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            check_folder(folder)
        except ModelError as error:
            status = 0 if "cannot be read: Permission denied" in str(error) and error.hint else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (folder / locked).chmod(0o755)


def test_the_list_shows_an_absent_model_and_touches_nothing(tiny: Embedded) -> None:
    info = {model["name"]: model for model in list_models()}["tiny"]
    assert (info["state"], info["bytes"], info["reason"]) == ("absent", tiny.wheel_bytes, None)
    assert info["licence"] == tiny.licence
    assert not cache_dir().exists()


def test_the_cache_folder_follows_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("COATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "coattn"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative"):  # the XDG specification: a relative path counts as unset
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_dir() == tmp_path / ".cache" / "coattn"
