"""The site of docs/ builds without a warning: no dead link or anchor, and no page that the index lacks."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name, reason='the extra "docs" is not installed')
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-d", tmp_path / "trees", DOCS, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / page.relative_to(DOCS)).with_suffix(".html").exists() for page in DOCS.rglob("*.md"))
    assert "<strong>--gpu</strong>" in (tmp_path / "plan.html").read_text(), "two dashes, which can be copied"
