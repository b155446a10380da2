"""What is imported when, and that nothing changes by it: in a process of its own, from the lightest import on."""

import subprocess
import sys
from pathlib import Path

import pytest

import coattn
from tests.method.packages import install

PROGRAM = """
import sys
before = set(sys.modules)
import coattn
# an interrupt in what `coattn` itself imports would end in a traceback
assert set(sys.modules) - before - {"__future__"} == {"coattn", "coattn._version", "coattn.errors"}
assert "Cache" in dir(coattn)

from importlib import metadata
real = metadata.version
metadata.version = lambda name: "5.99.1" if name == "transformers" else real(name)
from coattn.cli.main import main
try:
    main(["plan", "Qwen3-8B", "--gpu", "24"])
except SystemExit as end:
    assert not end.code
from contextlib import redirect_stderr
from io import StringIO
for command in (["plan"], ["generate", "Hello", "--model"], ["chat", "--model"], ["serve", "--model"]):
    with redirect_stderr(StringIO()) as said:
        try:
            main([*command, "refused"])
        except SystemExit as end:
            assert end.code == 2
    assert "Models of family 'mamba' have states and no attention" in said.getvalue()
try:
    coattn.LLM("refused")
except coattn.errors.UnsupportedError as error:
    assert "'mamba'" in str(error)
else:
    raise AssertionError
assert "torch" not in sys.modules and "transformers" not in sys.modules

import coattn.hf, coattn.hf.query, coattn.engine.llm, coattn.hf.attach
coattn.LLM, coattn.Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
assert "coattn" not in str([*ALL_ATTENTION_FUNCTIONS])
assert "coattn_outside" not in sys.modules and "coattn.baselines.h2o" not in sys.modules

from coattn.method.table import METHODS
assert "outside" in METHODS and "coattn_outside" in sys.modules
"""
OUTSIDE = "import coattn\nMETHODS = (coattn.Method('outside', 'gpu', 'everything'),)\n"


def test_each_import_brings_what_it_needs_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch comes with the first model that runs, a package's parts with the first row that is looked up; a
    Transformers newer than those tested is said once."""
    install(tmp_path, "coattn-outside", OUTSIDE, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(coattn.__file__).parents[1]}")
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "config.json").write_text('{"model_type": "mamba", "state_size": 16}')
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Transformers 5.99.1 is newer") == 1
