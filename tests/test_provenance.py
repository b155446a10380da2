"""What a result says of the source that made it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from coattn import provenance
from coattn.errors import ConfigError
from tests.cli.run import coattn

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, from which `provenance` believes to run."""
    package = tmp_path / "src" / "coattn"
    (package / "inner").mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    (package / "inner" / "b.h").write_text("// b\n")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "PACKAGE", package)
    monkeypatch.delenv(provenance.VARIABLE, raising=False)
    git = ("git", "-c", "user.name=n", "-c", "user.email=e@example.org")
    for line in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "one")):
        subprocess.run([*git, *line], cwd=tmp_path, check=True)
    return tmp_path


def head(root: Path) -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()


def test_the_source_of_a_commit_is_known_by_its_hash(repository: Path) -> None:
    package = provenance.PACKAGE
    (package / "x.so").touch()
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").touch()
    assert provenance.commit() == head(repository)
    assert provenance.tree() == provenance.tree_of(head(repository))
    (repository / "README.md").write_text("not source")
    assert provenance.commit() == head(repository)


@pytest.mark.parametrize("name", ["a.py", "new.py"])
def test_other_source_is_called_so(repository: Path, name: str) -> None:
    (provenance.PACKAGE / name).write_text("a = 2\n")
    assert provenance.commit() == head(repository) + "-dirty"


def test_a_copy_is_told_its_commit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, own = head(repository), provenance.tree()
    monkeypatch.setenv(provenance.VARIABLE, SHA)
    assert provenance.commit() == SHA  # git does not know it
    monkeypatch.setenv(provenance.VARIABLE, first)
    (provenance.PACKAGE / "a.py").write_text("a = 2\n")
    assert provenance.commit() == f"{first}-dirty"  # git knows it, and it is another source
    shutil.rmtree(repository / ".git")
    assert provenance.commit() == first
    assert provenance.tree() != own  # by which the lie is found where the history is
    monkeypatch.delenv(provenance.VARIABLE)
    assert provenance.commit() is None


def test_a_commit_that_is_none_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(provenance.VARIABLE, "main")
    with pytest.raises(ConfigError, match="is no commit"):
        provenance.commit()
    done = coattn("bench", "decode", "--out", str(tmp_path / "x.json"))
    assert (done.returncode, "COATTN_COMMIT is 'main'" in done.stderr) == (2, True)
