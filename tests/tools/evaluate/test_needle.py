"""Needles: exact lengths, sentence borders, keys that are found or not, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.run import coattn
from tests.engine.small import tokenizer
from tests.tools.evaluate.tiny import save_model

from coattn.errors import InputError
from coattn.text import Text
from coattn.tools.evaluate import needle
from coattn.tools.evaluate.haystack import Haystack, frame

TEXT = Text("tale", "One day a fox met a crow. " * 5 + "The crow sang! The fox ran? It rained. " * 20)


@pytest.fixture
def haystack() -> Haystack:
    return Haystack(TEXT, tokenizer(), 1000)


def text_of(ids: list[int]) -> str:
    return str(tokenizer().decode(ids))


@pytest.mark.parametrize("length", [300, 511, 777, 3000])
def test_a_prompt_has_exactly_the_length_asked_for(haystack: Haystack, length: int) -> None:
    for cell in needle.grid([length + 200], 3):
        assert len(needle.prompt(cell, haystack)) == length + 200


def test_the_prompt_goes_through_the_chat_template(haystack: Haystack) -> None:
    cell = needle.grid([600], 1)[0]
    text = text_of(needle.prompt(cell, haystack))
    assert text.startswith(f"user: {needle.BEFORE}One day")
    assert text.endswith(f"{needle.QUESTION}\n")


def test_a_model_without_a_template_gets_the_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tokenizer().__class__(tokenizer_object=tokenizer().backend_tokenizer)
    first, last = frame(plain, "before", "after")
    assert (text_of(first), text_of(last)) == ("before", "after")


def test_depths_run_from_the_beginning_to_the_end(haystack: Haystack) -> None:
    cells = needle.grid([900], 5)
    places = [text_of(needle.prompt(cell, haystack)).index(cell.key) / 900 for cell in cells]
    assert [cell.depth for cell in cells] == [0, 0.25, 0.5, 0.75, 1]
    assert places == sorted(places)
    assert places[0] < 0.15
    assert places[-1] > 0.75


def test_a_needle_stands_between_sentences(haystack: Haystack) -> None:
    for cell in needle.grid([900], 6)[1:-1]:
        before, after = text_of(needle.prompt(cell, haystack)).split(needle.NEEDLE.format(key=cell.key))
        assert before.rstrip()[-1] in ".!?"
        assert after.lstrip()[0].isupper()


def test_keys_depend_on_the_seed_and_on_nothing_else() -> None:
    first, again, other = (needle.grid([600], 3, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert {c.key for c in first}.isdisjoint(c.key for c in other)
    assert needle.grid([600, 700], 3)[:3] == first


def test_a_length_that_is_given_twice_is_asked_once() -> None:
    assert needle.grid([600, 600], 2) == needle.grid([600], 2)


@pytest.mark.parametrize(("answer", "found"), [("It is KEY.", True), ("It is 4.", False), ("", False)])
def test_found_means_that_the_key_appears(answer: str, found: bool) -> None:
    cell = needle.grid([600], 1)[0]
    assert needle.judge(cell, answer.replace("KEY", cell.key))["found"] is found


def test_what_does_not_fit_is_refused(haystack: Haystack) -> None:
    with pytest.raises(InputError, match="too few"):
        needle.prompt(needle.grid([50], 1)[0], haystack)
    with pytest.raises(InputError, match="tokens too short for its question and its needle"):
        needle.prompt(needle.grid([200], 1)[0], haystack)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def run(model: str, *arguments: str) -> dict[str, Any]:
    done = coattn("eval", "needle", "--model", model, "--lengths", "300,420", "--depths", "2", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_command_fills_the_grid(model: str, tmp_path: Path) -> None:
    found = run(model, "--method", "streaming", "--gpu-share", "1/2", "--out", str(tmp_path / "n.json"))
    assert [(cell["length"], cell["depth"]) for cell in found["cells"]] == [(300, 0), (300, 1), (420, 0), (420, 1)]
    assert found["total"] == 4
    assert found["found"] == sum(cell["found"] for cell in found["cells"])
    assert {"model", "text", "params", "versions", "hardware", "command", "commit"} <= set(found)
    assert json.loads((tmp_path / "n.json").read_text()) == found


def test_quick_leaves_alone_what_is_given(model: str) -> None:
    found = run(model, "--quick")
    assert [each["length"] for each in found["by_length"]] == [300, 420]
    assert found["depths"] == 2


def test_gpu_share_bounds_the_memory_of_each_length(model: str) -> None:
    whole = run(model)["gpu_kv_peak"]
    own = run(model, "--method", "streaming", "--set", "sinks=8", "--gpu-share", "1/4")["gpu_kv_peak"]
    assert 0 < own <= whole / 4


def test_an_exact_method_answers_as_full_does(model: str) -> None:
    full = run(model, "--dtype", "float32")
    cpu = run(model, "--dtype", "float32", "--method", "cpu", "--set", "window_blocks=2")
    assert [cell["answer"] for cell in full["cells"]] == [cell["answer"] for cell in cpu["cells"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lengths", "20"], "too few"),
        (["--lengths", "510"], "positions"),
        (["--gpu-share", "2"], "--gpu-share"),
        (["--gpu-share", "1/8", "--gpu-kv", "1MiB"], "exclude each other"),
        (["--text", "nowhere.txt"], "no file"),
    ],
)
def test_bad_input_gets_one_sentence(model: str, arguments: list[str], sentence: str) -> None:
    done = coattn("eval", "needle", "--model", model, *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[1].startswith("hint: ")


@pytest.mark.model
def test_the_embedded_model_finds_a_pass_key() -> None:
    done = coattn("eval", "needle", "--lengths", "512", "--depths", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["found"] == 2
