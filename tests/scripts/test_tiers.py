"""`make test` in tiers: every test is in one of them, and one closing line says how many passed in all."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.tiers import function_of, split

pytest_plugins = ["pytester"]
SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("4 passed in 0.31s", {"passed": 4}),
        ("2 failed, 40 passed, 1 skipped, 6 deselected, 1 warning, 2 errors in 78.20s (0:01:18)\n",
         {"failed": 2, "passed": 40, "skipped": 1, "deselected": 6, "warnings": 1, "errors": 2}),
        ("===== 1 passed, 1 error in 3.00s =====", {"passed": 1, "errors": 1}),
        ("12 tests passed", None),
        ("FAILED tests/a.py::test - 4 passed in 0.31s", None),
        ("no tests ran in 0.01s", None),
    ],
)  # fmt: skip
def test_pytest_s_last_line_is_read(line: str, counts: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("run_tests", monkeypatch).read_closing(line) == counts


def test_tiers_end_with_one_line_that_pytest_could_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = load("run_tests", monkeypatch)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow: x\n  model: x\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\ndef test_quick(): pass\n\ndef test_bad(): assert 0\n\n"
        "@pytest.mark.slow\ndef test_slow(): pass\n\n@pytest.mark.model\ndef test_model(): pytest.skip('none')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "PARALLEL", ("-q", "-p", "no:cacheprovider"))
    monkeypatch.setenv("COATTN_TIERS", str(tmp_path / "tiers"))
    assert script.main([]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert script.read_closing(lines[-1]) == {"failed": 1, "passed": 2, "skipped": 1}
    assert lines.index("== quick tests") < lines.index("== slow and model tests")
    names = [line.partition(":")[0] for line in (tmp_path / "tiers").read_text().splitlines()]
    assert names == ["quick tests", "slow and model tests"]


def test_tests_that_time_something_run_alone_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("gpu_run", monkeypatch)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: x\n  model: x\n  alone: x\n")
    (tmp_path / "lab").mkdir()
    test = "import pytest\n\n@pytest.mark.gpu\ndef test_one(): pass\n\n"
    (tmp_path / "test_a.py").write_text(test)
    (tmp_path / "lab" / "test_b.py").write_text(f"{test}@pytest.mark.gpu\n@pytest.mark.alone\ndef test_two(): pass\n")
    ran, plain = [], script.run
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "run", lambda marks, tests: ran.append((marks, tests)) or plain(marks, tests))
    monkeypatch.setattr(script, "describe", lambda *words: {"counts": dict(words[2])})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("COATTN_CACHE", str(tmp_path))
    out = tmp_path / "run.json"
    words = ["gpu_run.py", "0" * 40, "test_a.py", "lab", "--processes", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert script.main() == 0
    assert json.loads(out.read_text()) == {"counts": {"passed": 3, "deselected": 1}}
    marks = "gpu and not model"
    assert ran == [
        (marks, ["test_a.py::test_one", "lab/test_b.py::test_one"]),
        (f"{marks} and alone", ["lab/test_b.py"]),
    ]


def test_a_process_that_dies_counts_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("gpu_run", monkeypatch)
    monkeypatch.setattr(
        script, "PYTEST", (sys.executable, "-c", "import os; os.write(1, b'1 passed in 0.1s'); os._exit(3)")
    )
    counts, said = script.run("gpu", ["tests/a.py"])
    assert counts == {"passed": 1, "errors": 1}
    assert "pytest ended with 3 over tests/a.py" in said


def test_files_that_do_not_import_count_and_stop_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("gpu_run", monkeypatch)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: x\n")
    (tmp_path / "test_one.py").write_text("import nowhere\n")
    (tmp_path / "test_two.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\n@pytest.mark.parametrize('i', range(3))\ndef test_i(i): assert i < 2\n\n"
        "def test_other(): pass\n"
    )
    monkeypatch.setattr(script, "ROOT", tmp_path)
    files = script.collect("gpu", ["."])
    assert files == {"test_one.py": ["test_one.py"], "test_two.py": [f"test_two.py::test_i[{i}]" for i in range(3)]}
    counts, _ = script.run("gpu", [test for tests in files.values() for test in tests])
    assert counts == {"failed": 1, "passed": 2, "errors": 1}


def test_a_long_matrix_is_sampled_and_its_quick_cases_are_few(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile(
        test_many="""
        import pytest

        @pytest.mark.parametrize("n", range(20))
        def test_each(n): pass

        @pytest.mark.parametrize("n", [pytest.param(0, marks=pytest.mark.slow), 1])
        def test_long(n): pass

        @pytest.mark.whole
        @pytest.mark.parametrize("n", range(4))
        def test_whole(n): pass

        def test_new(): pass
        """
    )
    items = pytester.getitems(path.read_text())
    names = {function_of(item.nodeid).rpartition("::")[2]: function_of(item.nodeid) for item in items}
    kept, left_out = split(items, {names["test_each"]: 0.4, names["test_long"]: 90.0, names["test_whole"]: 90.0})
    assert len(kept) == 5 + 1 + 4 + 1
    assert len(left_out) == 15 + 1
    assert sum("slow" not in item.keywords for item in kept) == 1 + 0 + 1, "one of each function is 0.5 s at most"
    assert [item.name for item in kept if "test_long" in item.name] == ["test_long[1]"], "those marked slow go first"
