"""How keys spread is measured once for each model and kept; a file of one's own text does as well."""

import json
import logging
from pathlib import Path

import pytest
import torch
from tests.cli.run import coattn as command
from tests.engine.small import greedy, small, tokenizer
from tests.tools.evaluate.tiny import save_model

from coattn.engine.llm import LLM
from coattn.errors import InputError
from coattn.hf import sketches
from coattn.hf.forward import Session
from coattn.hf.prefilled import prefill
from coattn.kernels.quantise.sketch import SPREADS

TEXT = "How much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 8


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sketches, "folder", lambda: tmp_path / "sketches")
    return tmp_path / "sketches"


def test_measured_is_what_the_keys_and_queries_of_the_pieces_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces that lie one after another where the text has them, they are those of one prompt, but for what
    earlier pieces would have told the later layers: of the first layer."""
    model, ids = small(), torch.randint(0, 250, (32,))
    monkeypatch.setattr(sketches, "PIECES", 2)
    with Session(model) as session:
        found = sketches.measure(session, torch.cat([ids, ids]), 64)[0]
    parts = [prefill(model, ids), prefill(model, torch.cat([ids, ids]))]
    keys = torch.cat([parts[0].kv[0][0][4:], parts[1].kv[0][0][36:]]).double()
    torch.testing.assert_close(found.mean, keys.mean(0).float())
    off = keys - keys.mean(0)
    torch.testing.assert_close(found.cov, (torch.einsum("nhd,nhe->hde", off, off) / len(keys)).float())
    # all queries count, and of each as many heads as share a KV head
    queries = torch.cat([parts[0].queries[0], parts[1].queries[0][-32:]]).double().view(64, 2, 2, -1)
    want = (torch.einsum("nhgd,nhge->hde", queries, queries) / 128).float()
    torch.testing.assert_close(found.moment, want, rtol=1e-4, atol=1e-4)


def test_an_engine_measures_once_and_the_next_one_finds_it(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM((small(), tokenizer()), "auto", max_length=256) as llm:
        (path,) = kept.iterdir()
        assert llm.composed.params["sketch"] == str(path)
        assert llm.report()["params"]["sketch"] == path.name, "a report and a saved session name no folder"
        assert llm.runner.runtime.groups[0].index.made == 1  # type: ignore[attr-defined]
        (want,) = llm.generate(TEXT[:200], greedy(8))
    assert SPREADS.read_origin(str(path)).text == "python help topics"
    measured: list[object] = []
    monkeypatch.setattr(sketches, "measure", lambda *_: measured.append(_))
    with LLM((small(), tokenizer()), "auto", max_length=256) as llm:
        assert llm.generate(TEXT[:200], greedy(8))[0].token_ids == want.token_ids
    assert not measured
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(AttributeError):  # a damaged file is made again; here by something that gives nothing
        LLM((small(), tokenizer()), "auto", max_length=256)
    with pytest.raises(AttributeError):  # another model is measured
        LLM((small(seed=1), tokenizer()), "auto", max_length=256)
    assert [each.name for each in kept.iterdir()] == [path.name]  # what failed leaves nothing


@pytest.mark.parametrize("more", [{"method": "full"}, {"method": "auto", "quality": 1.0}])
def test_nothing_is_measured_where_nothing_is_sketched(kept: Path, more: dict[str, object]) -> None:
    with LLM((small(), tokenizer()), max_length=256, **more) as llm:  # type: ignore[arg-type]
        assert llm.generate("one two", greedy(2))[0].token_ids
    assert not kept.exists()


def test_where_nothing_can_be_kept_the_first_prompt_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sketches, "folder", lambda: tmp_path / "file" / "sketches")
    with caplog.at_level(logging.WARNING), LLM((small(), tokenizer()), "auto", max_length=256) as llm:
        assert "cannot be kept in" in caplog.text
        assert llm.composed.params["sketch"] is None
        assert len(llm.generate(TEXT[:200], greedy(8, ignore_eos=True))[0].token_ids) == 8
        assert llm.runner.runtime.groups[0].index.made == 1  # type: ignore[attr-defined]


def test_a_text_that_is_too_short_is_refused() -> None:
    with Session(small()) as session, pytest.raises(InputError, match="has 4 tokens, too few"):
        sketches.measure(session, torch.arange(4), 512)


def test_the_command_writes_a_file_that_the_method_takes(tmp_path: Path) -> None:
    model, text, target = save_model(tmp_path / "model"), tmp_path / "text", tmp_path / "spread"
    text.write_text(TEXT)
    done = command("calibrate", "auto", "--model", model, "--text", str(text), "--out", str(target), "--json")
    assert done.returncode == 0, done.stderr
    found, origin = json.loads(done.stdout), SPREADS.read_origin(str(target))
    assert (origin.text, origin.tokens) == ("text", found["tokens"])
    used = ("--method", "auto", "--set", f"sketch={target}", "--max-new-tokens", "3")
    done = command("generate", "one two", "--model", model, *used)
    assert done.returncode == 0, done.stderr
    again = command("calibrate", "auto", "--model", model, "--text", str(text), "--out", str(target))
    assert again.returncode == 0, again.stderr  # what the same command wrote is written over
    other = command("calibrate", "infinigen", "--model", model, "--text", str(text), "--out", str(target))
    assert "holds a result of another command" in other.stderr
