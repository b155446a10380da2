"""A package from outside, as `pip install` leaves it in a folder."""

import sys
from pathlib import Path

import pytest

from coattn.method import registry as registry_module


def install(folder: Path, package: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a package of one module on the path, with an entry point for coattn, and lets the registry read anew."""
    module = package.replace("-", "_")
    monkeypatch.delitem(sys.modules, module, raising=False)
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry_module.GROUP}]\nmine = {module}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(registry_module, "_registry", None)
