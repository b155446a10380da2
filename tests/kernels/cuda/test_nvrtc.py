"""Compiled kernels are kept, by source, constants, GPU and compiler; what is damaged is compiled anew."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coattn.kernels.cuda import nvrtc

FORM = ("bound_scores.cu", (("THREADS", 64),))
pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason="there is no libnvrtc")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path))
    nvrtc.cubin.cache_clear()
    nvrtc.counts.clear()
    yield tmp_path / "kernels"
    nvrtc.cubin.cache_clear()


def again() -> bytes:
    """As in another process."""
    nvrtc.cubin.cache_clear()
    return nvrtc.cubin(*FORM, "sm_90")


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    made = again()
    assert dict(nvrtc.counts) == {"compiled": 1}
    assert nvrtc.cubin(*FORM, "sm_90") is made
    assert again() == made == nvrtc.compile_cubin((nvrtc.FOLDER / FORM[0]).read_text(), dict(FORM[1]), "sm_90")
    assert dict(nvrtc.counts) == {"compiled": 1, "read": 1}


def test_constants_and_gpus_have_files_of_their_own(folder: Path) -> None:
    again()
    nvrtc.cubin(FORM[0], (("THREADS", 128),), "sm_90")
    nvrtc.cubin(*FORM, "sm_80")
    assert dict(nvrtc.counts) == {"compiled": 3}
    assert [len(list(folder.glob(f"{arch}/bound_scores-*.cubin"))) for arch in ("sm_80", "sm_90")] == [1, 2]
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 3


@pytest.mark.parametrize("damage", [lambda x: b"", lambda x: x[:-1], lambda x: x[:50] + b"\0\1\2" + x[53:]])
def test_a_damaged_file_is_compiled_anew(folder: Path, damage) -> None:  # type: ignore[no-untyped-def]
    made = again()
    [path] = folder.rglob("*.cubin")
    path.write_bytes(damage(path.read_bytes()))
    assert again() == made
    assert dict(nvrtc.counts) == {"compiled": 2}
    assert again() == made
    assert dict(nvrtc.counts) == {"compiled": 2, "read": 1}


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, folder: Path) -> None:
    folder.write_text("not a folder")
    assert again() == again()
    assert dict(nvrtc.counts) == {"compiled": 2}


def test_another_compiler_or_header_is_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again()
    monkeypatch.setattr(nvrtc, "_version", lambda: (99, 9))
    again()
    assert dict(nvrtc.counts) == {"compiled": 2}


def test_many_are_compiled_side_by_side(folder: Path) -> None:
    forms = [(FORM[0], (("THREADS", 32 * i),)) for i in (1, 2, 3)]
    nvrtc.compile_all(forms, "sm_90")
    assert nvrtc.counts["compiled"] == 3
    nvrtc.cubin(*forms[1], "sm_90")
    assert nvrtc.counts["compiled"] == 3
