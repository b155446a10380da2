"""Needles: exact lengths, sentence borders, keys that are found or not, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.run import coattn
from tests.engine.small import tokenizer
from tests.tools.evaluate.tiny import save_model, save_rows

from coattn.errors import InputError
from coattn.text import Text
from coattn.tools.evaluate import needle
from coattn.tools.evaluate.haystack import Haystack, frame
from coattn.tools.evaluate.needles import read_needles

TEXT = Text("tale", "One day a fox met a crow. " * 5 + "The crow sang! The fox ran? It rained. " * 20)


@pytest.fixture
def haystack() -> Haystack:
    return Haystack(TEXT, tokenizer(), 1000)


def text_of(ids: list[int]) -> str:
    return str(tokenizer().decode(ids))


@pytest.mark.parametrize("length", [300, 511, 777, 3000])
@pytest.mark.parametrize("keys", [1, 2])
def test_a_prompt_has_exactly_the_length_asked_for(haystack: Haystack, length: int, keys: int) -> None:
    for cell in needle.grid([length + 200], 3, keys=keys):
        assert len(needle.prompt(cell, haystack)) == length + 200


def test_the_prompt_goes_through_the_chat_template(haystack: Haystack) -> None:
    cell = needle.grid([600], 1)[0]
    text = text_of(needle.prompt(cell, haystack))
    assert text.startswith(f"user: {cell.asked.before}\n\nOne day")
    assert text.endswith(f"{cell.asked.question}\n")


def test_a_model_without_a_template_gets_the_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tokenizer().__class__(tokenizer_object=tokenizer().backend_tokenizer)
    first, last = frame(plain, "before", "after")
    assert (text_of(first), text_of(last)) == ("before", "after")


def test_depths_run_from_the_beginning_to_the_end(haystack: Haystack) -> None:
    cells = needle.grid([900], 5)
    places = [text_of(needle.prompt(cell, haystack)).index(cell.asked.needle) / 900 for cell in cells]
    assert [cell.depth for cell in cells] == [0, 0.25, 0.5, 0.75, 1]
    assert places == sorted(places)
    assert places[0] < 0.15
    assert places[-1] > 0.75


def test_a_needle_stands_between_sentences(haystack: Haystack) -> None:
    for cell in needle.grid([900], 6)[1:-1]:
        before, after = text_of(needle.prompt(cell, haystack)).split(cell.asked.needle)
        assert before.rstrip()[-1] in ".!?"
        assert after.lstrip()[0].isupper()


def test_several_keys_are_all_there_and_have_names(haystack: Haystack) -> None:
    cell = needle.grid([1500], 1, keys=4)[0]
    text = text_of(needle.prompt(cell, haystack))
    numbers = {each.answer for each in (cell.asked, *cell.others)}
    assert len(numbers) == 4
    assert all(text.count(number) == 2 for number in numbers)


def test_keys_depend_on_the_seed_and_on_nothing_else() -> None:
    first, again, other = (needle.grid([600], 3, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert {c.asked.answer for c in first}.isdisjoint(c.asked.answer for c in other)
    assert needle.grid([600, 700], 3)[:3] == first


def test_a_length_that_is_given_twice_is_asked_once() -> None:
    assert needle.grid([600, 600], 2) == needle.grid([600], 2)


@pytest.mark.parametrize(("answer", "found"), [("It is KEY.", True), ("It is 4.", False), ("", False)])
def test_found_means_that_the_key_appears(answer: str, found: bool) -> None:
    cell = needle.grid([600], 1)[0]
    assert needle.judge(cell, answer.replace("KEY", cell.asked.answer))["found"] is found


def test_what_does_not_fit_is_refused(haystack: Haystack) -> None:
    with pytest.raises(InputError, match="too few"):
        needle.prompt(needle.grid([50], 1)[0], haystack)
    with pytest.raises(InputError, match=r"tokens too short for its question and 8 needle\(s\)"):
        needle.prompt(needle.grid([250], 1, keys=8)[0], haystack)


def test_needles_of_a_file(tmp_path: Path, haystack: Haystack) -> None:
    rows = [
        {"needle": "The best thing to eat is a plum.", "question": "What is best?", "answer": "Plum"},
        {"needle": "The code is {key}.", "question": "Which code?"},
    ]
    save_rows(tmp_path / "n.jsonl", rows)
    first, second = needle.grid([600], 2, needles=read_needles(tmp_path / "n.jsonl"))
    assert needle.judge(first, "a plum")["found"]
    assert f"The code is {second.asked.answer}." in text_of(needle.prompt(second, haystack))


@pytest.mark.parametrize(
    "line", ["no json", "[1]", '{"needle": "x"}', '{"needle": "x", "question": "y"}', '{"needle": 1, "question": "y"}']
)
def test_bad_needles_are_refused_with_their_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "n.jsonl").write_text(line)
    with pytest.raises(InputError, match="line 1"):
        read_needles(tmp_path / "n.jsonl")


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


def test_every_length_says_what_a_step_reads(model: str) -> None:
    whole, half = ({each["length"]: each["read_share"] for each in run(model, *more)["by_length"]}
                   for more in ((), ("--method", "streaming", "--set", "recent=128")))  # fmt: skip
    assert whole == {300: 1.0, 420: 1.0}
    assert 128 / 420 <= half[420] < half[300] < 0.75
    own = run(model, "--method", "hgca", "--set", "window_blocks=16", "--set", "beta=1e9", "--set", "block=4")
    shares = {each["length"]: each["read_share"] for each in own["by_length"]}  # the window, of each prompt by itself
    assert 64 / 420 <= shares[420] < shares[300] < 0.5


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
        (["--haystack", "a", "--text", "b"], "mean the same"),
        (["--haystack", "nowhere.txt"], "no file"),
        (["--keys", "1000"], "--keys"),
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
