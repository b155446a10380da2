"""An extension that was built from other sources than those beside it is refused."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

import coattn
from coattn.native.core import NativeError, check_sources, extension

CSRC = Path(coattn.__file__).parent / "native" / "csrc"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    if not CSRC.is_dir():
        pytest.skip("the package lies here without its C++ sources")
    shutil.copytree(CSRC, tmp_path / "csrc")
    return tmp_path / "csrc"


def test_the_build_and_the_loader_make_the_same_hash(copy: Path) -> None:
    (copy / "notes.txt").write_text("not a source")
    start = time.process_time()
    check_sources(copy, extension.source_hash)
    assert time.process_time() - start < 0.1


@pytest.mark.parametrize("change", ["edit", "add", "rename", "remove"])
def test_other_sources_are_refused(copy: Path, change: str) -> None:
    path = copy / "kernels" / "attend.h"
    if change == "edit":
        path.write_text(path.read_text() + "\n")
    elif change == "add":
        (copy / "new.h").write_text("")
    elif change == "rename":
        path.rename(path.with_name("attends.h"))
    else:
        path.unlink()
    with pytest.raises(NativeError, match="built from other sources") as caught:
        check_sources(copy, extension.source_hash)
    assert "make setup" in caught.value.hint


def test_an_older_extension_without_a_hash_is_refused(copy: Path) -> None:
    with pytest.raises(NativeError):
        check_sources(copy, None)


def test_a_wheel_states_the_hash_of_its_sources(tmp_path: Path) -> None:
    """It has no sources: an extension that another wheel left behind is refused all the same."""
    (tmp_path / "source_hash.txt").write_text(f"{extension.source_hash}\n")
    check_sources(tmp_path / "csrc", extension.source_hash)
    for built in ("0" * 64, None):
        with pytest.raises(NativeError, match="not the one of the wheel") as caught:
            check_sources(tmp_path / "csrc", built)
        assert "pip install" in caught.value.hint


def test_without_sources_and_hash_an_extension_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NativeError):
        check_sources(tmp_path / "csrc", extension.source_hash)
