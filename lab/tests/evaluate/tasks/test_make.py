"""Prompts from RULER's generators and with needles: what is asked is in what is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.engine.small import tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coattn.errors import ConfigError, InputError
from coattn.text import Text
from coattn_lab.evaluate.tasks import longbench_make, needle_make, ruler_make
from coattn_lab.evaluate.tasks.rules import score


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: all the generators want is a count."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def installed() -> bool:
    try:
        ruler_make.check_package()
    except ConfigError:
        return False
    return True


ruler = pytest.mark.skipif(not installed(), reason="RULER's package is not installed")


@ruler
@pytest.mark.slow
@pytest.mark.parametrize("task", ["niah_multikey_2", "vt", "cwe", "fwe", "qa_1"])
def test_rulers_prompts_hold_their_answers_and_end_with_their_question(task: str) -> None:
    found = ruler_make.make(words(), [4096, 6000], 2, 7, [task])
    assert [prompt.length for prompt in found] == [4096, 4096, 6000, 6000]
    assert len({prompt.name for prompt in found}) == 4
    for prompt in found:
        count = len(words()(prompt.context + prompt.question + prompt.prefix)["input_ids"])
        assert prompt.length // 3 < count <= prompt.length
        assert score(prompt.rule, prompt.context, prompt.outputs) == 1
        assert "?" in prompt.question or "Find all" in prompt.question
        assert prompt.prefix.startswith((" Answer:", " The special magic"))
        # the worked example of cwe asks the same
        assert prompt.context.count(prompt.question.strip()) == (1 if task == "cwe" else 0)
    if task not in ("vt", "fwe"):  # what is common to all is tried with those that are made in seconds
        return
    again = ruler_make.make(words(), [4096], 2, 7, [task])
    assert again == found[:2]
    assert ruler_make.make(words(), [4096], 2, 8, [task])[0].context != found[0].context


@ruler
def test_a_generator_that_never_ends_is_ended() -> None:
    with pytest.raises(InputError, match="did not end"):
        ruler_make.make(tokenizer(), [1024], 1, 0, ["vt"], seconds=8)  # one token a byte: nothing fits


@ruler
def test_unknown_tasks_and_short_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="no task 'niah'"):
        ruler_make.make(words(), [4096], 1, 0, ["niah"])
    with pytest.raises(ConfigError, match="as short as 512"):
        ruler_make.make(words(), [512], 1, 0)


def test_a_prompt_is_cut_at_its_last_question() -> None:
    template = "Read.\n{context}\nWhat is {query}?"
    text = "Read.\nWhat is this? Answer: it\nis x.\nWhat is x? Answer: for x it is"
    assert ruler_make.cut(text, template, " Answer: for {query} it is") == (
        "Read.\nWhat is this? Answer: it\nis x.",
        "\nWhat is x?",
        " Answer: for x it is",
    )
    with pytest.raises(InputError, match="does not end"):
        ruler_make.cut("Read. Nothing.", template, " Answer:")


def test_needles_lie_at_their_depth() -> None:
    text = Text("numbers", " ".join(f"This is sentence {i}." for i in range(3000)))
    found = needle_make.make(tokenizer(), text, [1500, 3000], 3, 1)
    assert len(found) == 2 * 4 * 3
    for prompt in found:
        assert score("all", prompt.context, prompt.outputs) == 1
        assert score("all", prompt.question, prompt.outputs) == 0
        depth = float(prompt.name.rsplit("/", 1)[1])
        place = prompt.context.index(prompt.outputs[0]) / len(prompt.context)
        assert abs(place - depth) < 0.25
        tokens = len(tokenizer()(prompt.context + prompt.question)["input_ids"])
        assert prompt.length - 200 < tokens <= prompt.length - prompt.new_tokens
    assert len({prompt.outputs for prompt in found if prompt.task == "needle_pass_key"}) == 6


INPUTS = {
    "trec": "Question: What is asked?\nType:",
    "triviaqa": "Passage:\nA passage.\nQuestion:\nWhat is asked?\nAnswer:\n",
    "samsum": "Dialogue: A: What is asked?\nSummary: ",
    "lsht": "新闻内容：\n问题\n类别：",  # noqa: RUF001
}
"""Questions as few-shot datasets have them, after examples of the same form."""


@pytest.mark.parametrize("name", list(longbench_make._tasks()))
def test_a_whole_prompt_is_cut_where_its_question_begins(name: str, tmp_path: Path) -> None:
    """MiniLongBench's files hold prompts; what is fed under a method is the question alone."""
    task = longbench_make._tasks()[name]
    given = INPUTS.get(name, "What is asked?")
    context = (INPUTS.get(name, "w1 w2 ") + "\n") * 20
    prompt = task["prompt"].replace("{context}", context).replace("{input}", given).lstrip("\n")
    gold = {"answers": ["w3"], "all_classes": ["w3", "w4"]} if task["score"] == "classification" else ["w3", "w5"]
    (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt, "gold": gold}) + "\n", encoding="utf-8")
    (found,), _ = longbench_make.make(tmp_path, tokenizer(), [1 << 14], 20, [name])
    assert found.context + found.question == prompt
    assert found.context.rstrip().endswith(context.strip().split("\n")[-1]) or name == "repobench-p"
    if "{input}" in task["prompt"] and name != "repobench-p":
        assert given.strip() in found.question
    assert (found.benchmark, found.outputs) == (
        "minilongbench",
        ("w3", "w3", "w4") if "all_classes" in gold else ("w3", "w5"),
    )
    assert found.new_tokens == task["new_tokens"]


def test_a_prompt_without_a_question_is_refused() -> None:
    with pytest.raises(InputError, match="has no question"):
        longbench_make.split("only words", {"prompt": "{context}"})
