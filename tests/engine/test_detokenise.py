"""Text as it comes adds up to the text of all tokens; stop strings are found wherever the borders fall."""

from typing import Any

import pytest
from tests.engine.small import END, tokenizer
from tokenizers import Tokenizer, decoders, models

from coattn.engine.sampling.detokenise import HALF, Pieces, StopText, TextStream

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

TEXT = "naïve café — 日本語 🙂🙃 e\u0301 \u200d end"


class Slow:
    """A tokenizer without a fast backend: bytes, decoded by Python."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def pieces(tokens: list[int], kind: Any) -> list[str]:
    stream = Pieces(kind)
    return [*map(stream.push, tokens), stream.flush()]


@pytest.mark.parametrize("kind", [tokenizer(), Slow()], ids=["fast", "slow"])
def test_no_half_characters_are_shown(kind: Any) -> None:
    found = pieces(list(TEXT.encode()), kind)
    assert "".join(found) == TEXT
    assert not any(HALF in piece for piece in found)
    assert sum(map(bool, found)) == len(TEXT), "every character comes as soon as it is whole"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 256), st.sampled_from(TEXT.encode())), max_size=40))
def test_pieces_of_any_tokens_add_up(tokens: list[int]) -> None:
    for kind in (tokenizer(), Slow()):
        whole = kind.decode(tokens, skip_special_tokens=True)
        assert "".join(pieces(tokens, kind)) == whole


def test_a_text_that_ends_within_a_character_shows_the_gap_only_at_the_end() -> None:
    found = pieces([*b"ab", *"🙂".encode()[:2]], tokenizer())
    assert found[:-1] == ["a", "b", "", ""]
    assert found[-1].strip(HALF) == ""
    assert found[-1]


def test_special_tokens_have_no_text() -> None:
    assert "".join(pieces([*b"ab", END, *b"c"], tokenizer())) == "abc"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert pieces([1, 2, 3], None) == ["", "", "", ""]


def test_a_decoder_that_rewrites_what_it_said_falls_back() -> None:
    """Word pieces: a space before each word but the first, which the library's stream may give up on."""
    vocab = {word: i for i, word in enumerate(["<unk>", "to", "day", "##day", "is", ",", "##s"])}
    inner = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    inner.decoder = decoders.WordPiece(cleanup=True)

    class Fast:
        backend_tokenizer = inner

    tokens = [1, 3, 4, 5, 1, 6, 2, 5]
    assert "".join(pieces(tokens, Fast())) == inner.decode(tokens)


def test_a_broken_stream_is_replaced_in_the_middle() -> None:
    stream = Pieces(tokenizer())
    found = [stream.push(i) for i in "a🙂b".encode()[:3]]

    class Broken:
        def step(self, *_: Any) -> str:
            raise RuntimeError("Invalid prefix encountered")

    stream._stream = Broken()
    found += [stream.push(i) for i in "a🙂b".encode()[3:]]
    assert "".join(found) + stream.flush() == "a🙂b"


def cut_by_hand(text: str, stops: list[str]) -> str:
    """Letter by letter: the first moment at which the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


letters = st.text(alphabet="ab ", max_size=14)


@settings(max_examples=300, deadline=None)
@given(st.lists(letters, max_size=8), st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=3))
def test_stop_strings_do_not_depend_on_the_borders(parts: list[str], stops: list[str]) -> None:
    stream, shown = StopText(stops), ""
    want = cut_by_hand("".join(parts), stops)
    for part in parts:
        shown += stream.push(part)
        assert want.startswith(shown), "shown too early"
    assert shown + stream.flush() == want
    assert stream.stopped == (want != "".join(parts))


def test_what_may_begin_a_stop_string_waits() -> None:
    stream = TextStream(tokenizer(), ["###"])
    shown = [stream.push(i) for i in b"a#b##c#"]
    assert shown == ["a", "", "#b", "", "", "##c", ""]
    assert stream.flush() == "#"
    assert stream.text == "a#b##c#"


def test_after_a_stop_string_nothing_comes() -> None:
    stream = TextStream(tokenizer(), ["END"])
    assert [stream.push(i) for i in b"xENDy"] == ["x", "", "", "", ""]
    assert stream.stop.stopped
    assert (stream.flush(), stream.text) == ("", "x")


def test_special_tokens_have_text_where_it_is_asked_for() -> None:
    ids = [*b"a", END, *b"b"]
    for special, want in ((False, "ab"), (True, "a<end>b")):
        stream = Pieces(tokenizer(), special)
        assert "".join(map(stream.push, ids)) + stream.flush() == want
