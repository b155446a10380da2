"""The public scoring rules, each by an example worked by hand."""

from __future__ import annotations

import pytest

from coattn.errors import UnsupportedError
from coattn_lab.evaluate import chinese, scores
from coattn_lab.evaluate.rouge import common, rouge_l

CLASSES = ("Food", "City", "Other location", "location", "Date")


def test_qa_f1_is_over_words_without_case_articles_and_punctuation() -> None:
    # LongBench qa_f1_score: {tall, red, house} and {red, house, in, paris} share 2: P 2/3, R 2/4, F1 4/7
    assert scores.qa_f1("The tall, red house.", "a Red house in Paris") == pytest.approx(4 / 7)


def test_qa_f1_counts_a_repeated_word_as_often_as_both_have_it() -> None:
    # bag of words: {no, no} and {no} share one: P 1/2, R 1, F1 2/3
    assert scores.qa_f1("no no", "No!") == pytest.approx(2 / 3)


@pytest.mark.parametrize(("said", "meant"), [("", "yes"), ("the", "the"), ("blue", "red")])
def test_qa_f1_is_zero_without_a_shared_word(said: str, meant: str) -> None:
    assert scores.qa_f1(said, meant) == 0


def test_qa_f1_in_chinese_is_over_words_without_punctuation(monkeypatch: pytest.MonkeyPatch) -> None:
    # LongBench qa_f1_zh_score: {他, 在, 北京} and {在, 北京, 大学} share 2: F1 = 2*2 / (3+3)
    monkeypatch.setattr(chinese, "words", lambda text: text.split("|"))
    assert scores.qa_f1_zh("他|在|北京|。", "在|。|北京|大学") == pytest.approx(2 / 3)


def test_rouge_in_chinese_is_over_words(monkeypatch: pytest.MonkeyPatch) -> None:
    # LongBench rouge_zh_score: LCS 在 北京 of 3 words each: F = 2/3
    monkeypatch.setattr(chinese, "words", lambda text: text.split("|"))
    assert scores.rouge_zh("他|在|北京", "在|北京|大学") == pytest.approx(2 / 3)


def test_chinese_scores_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jieba", None)
    with pytest.raises(UnsupportedError, match="jieba"):
        scores.qa_f1_zh("北京", "北京")


def test_rouge_l_of_one_sentence() -> None:
    # Lin 2004, 3.1: the LCS is "police the gunman", three of four words of both: P = R = F = 3/4
    assert scores.rouge("police kill the gunman", "police killed the gunman") == pytest.approx(3 / 4)


def test_rouge_l_depends_on_order() -> None:
    # Lin 2004, 3.1: of "the gunman kill police" only two words in order are left: 2/4
    assert scores.rouge("the gunman kill police", "police killed the gunman") == pytest.approx(2 / 4)


def test_rouge_l_of_a_summary_is_the_union_over_its_sentences() -> None:
    # Lin 2004, 3.2: r = w1..w5; "w1 w2" and "w1 w3 w5" make the union {w1, w2, w3, w5}: R 4/5, P 4 of 8 distinct words
    said = "w1 w2 w6 w7 w8. w1 w3 w8 w9 w5"
    assert rouge_l(said, "w1 w2 w3 w4 w5") == pytest.approx(2 * (4 / 5) * (4 / 8) / (4 / 5 + 4 / 8))


def test_rouge_l_counts_distinct_words_as_the_package_does() -> None:
    # `rouge` 1.0.1: {a} of {a} and of {a, b}: P 1, R 1/2, F 2/3
    assert rouge_l("a a a", "a b") == pytest.approx(2 / 3)


@pytest.mark.parametrize(("said", "meant"), [("", "a"), ("...", "a"), ("a", "")])
def test_rouge_l_of_nothing_is_zero(said: str, meant: str) -> None:
    assert rouge_l(said, meant) == 0


def test_a_longest_common_subsequence() -> None:
    assert common([*"abcbdab"], [*"bdcaba"]) in (["b", "c", "b", "a"], ["b", "d", "a", "b"], ["b", "c", "a", "b"])


def test_classification_shares_the_point_among_the_classes_named() -> None:
    # LongBench classification_score: the right one and a wrong one are named: 1/2
    assert scores.classification("Food or City", "City", CLASSES) == 1 / 2
    assert scores.classification("Type: City", "City", CLASSES) == 1
    assert scores.classification("Food", "City", CLASSES) == 0
    assert scores.classification("", "City", CLASSES) == 0


def test_classification_ignores_a_class_whose_name_is_part_of_the_right_one() -> None:
    # LongBench classification_score: "location" is named too, but only as a part of "Other location"
    assert scores.classification("Other location", "Other location", CLASSES) == 1


@pytest.mark.parametrize(
    ("said", "score"),
    [("Paragraph 12", 1), ("Paragraph 12 or 3", 1 / 2), ("Paragraph 1", 0), ("none", 0), ("12 12 2", 2 / 3)],
)
def test_retrieval_is_the_share_of_numbers_that_are_right(said: str, score: float) -> None:
    # LongBench retrieval_score and retrieval_zh_score: numbers in the answer that equal the paragraph's
    assert scores.retrieval(said, "Paragraph 12") == pytest.approx(score)
    assert scores.retrieval(said, "段落12") == pytest.approx(score)


def test_code_similarity_is_of_the_first_line_of_code() -> None:
    # LongBench code_sim_score: the fence and the comment are passed over; 2 * 9 / (9 + 10) = 94.7 -> 95%
    said = "\n```python\n# the next line\nreturn x1\nreturn 0"
    assert scores.code_similarity(said, "return x12") == 0.95
    assert scores.code_similarity("return x", "return x") == 1
    assert scores.code_similarity("// only a comment", "return x") == 0


def test_ruler_wants_all_strings_in_part() -> None:
    # RULER string_match_all: share of the references that appear, whatever the case: 2 of 3
    assert scores.match_all("The numbers are 17 and ABC.", ["17", "abc", "99"]) == pytest.approx(2 / 3)


def test_ruler_questions_want_any_string() -> None:
    # RULER string_match_part: the best of the references
    assert scores.match_part("It was Paris.", ["London", "paris"]) == 1
    assert scores.match_part("It was Rome.", ["London", "paris"]) == 0
