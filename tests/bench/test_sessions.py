"""`bench sessions` on a tiny model: every key that scripts rely on, and that what is stored was not read again."""

from __future__ import annotations

import json
import random

import pytest
import torch
from tests.bench.test_decode import TINY, coattn

from coattn.bench import sessions
from coattn.bench.sessions import Setting, compare_gaps, sooner
from coattn.evaluate.session_rows import NO_GAPS, WORDS, session_rows


def test_what_is_stored_is_not_read_again() -> None:
    size = ("--tokens", "256", "--rounds", "2", "--questions", "3", "--new", "2", "--others", "2", "--pairs", "2")
    more = (
        "--other-tokens",
        "40",
        "--methods",
        "full,cpu,window_blocks=2",
        "--checks",
        "again,shared,beside,disk,tenants",
    )
    done = coattn("bench", "sessions", *TINY, *size, *more, "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["check"] for row in rows[::2]] == ["again", "shared", "beside", "disk", "tenants"]
    for row in rows:
        assert "refused" not in row, row
    for row in rows[:2]:
        assert row["cached_tokens"] == [256, 256]
        assert row["moved"]["prefill_tokens"] == 2 * 32
        assert row["moved"]["sequences_moved"] == row["moved"]["prefix_evicted"] == 0
        # the answer of two tokens has left one that is not stored
        assert row["turn_cached_tokens"] == [256 + 32 + 1, 256 + 32 + 1 + 102]
        assert row["second_ratio"] > 0
    assert rows[0]["moved"]["copied_bytes"] == 0
    assert rows[1]["moved"]["copied_bytes"] == 2 * 2 * 32 * 2 * 2 * 2 * 16 * 4, "twice a window of two blocks"
    assert rows[1]["turn_ratio"] == rows[1]["turn_median_s"] / rows[0]["turn_median_s"]
    for row in rows[2:4]:
        assert row["cached_tokens"] == [0, 256, 256]
        assert row["failed"] == 0
    for row in rows[4:6]:
        assert row["reading_steps"] > 0
        assert row["choosing_ratio"] > 0
    for row in rows[6:8]:
        assert row["same"]
    for row in rows[8:]:
        assert row["pairs"] == 2


def test_where_nobody_got_a_token_a_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from coattn.hf.random_model import random_model

    nothing = compare_gaps("choosing", [], [0.1], 2)
    assert nothing["choosing_note"] == NO_GAPS
    assert (nothing["choosing_steps"], nothing["choosing_ratio"], nothing["choosing_p99_s"]) == (0, None, None)
    some = compare_gaps("choosing", [0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.1, 0.2], 2)
    assert "choosing_note" not in some
    assert (some["choosing_steps"], some["choosing_p99_ratio"]) == (2, 2.0)
    assert some["choosing_median_ratio"] == some["choosing_ratio"] == pytest.approx(5 / 3)
    gone: dict[str, list[float] | None] = {"reading": [], "choosing": [], "choosing_s": None}
    monkeypatch.setattr(sessions, "_turn_beside", lambda *_: gone)
    model = random_model("tiny", torch.device("cpu"), torch.float32)
    row = sessions.beside(model, "cpu", Setting(tokens=40, others=1, other_tokens=20, rounds=1))
    assert row["choosing_note"] == row["reading_note"] == NO_GAPS
    assert row["between_median_s"] > 0
    assert WORDS["beside"](row).endswith(f"chosen again {NO_GAPS}")
    monkeypatch.setattr(sessions, "_quiet", lambda *_: [])
    row = sessions.beside(model, "cpu", Setting(tokens=40, others=1, other_tokens=20, rounds=1))
    assert NO_GAPS in WORDS["beside"](row)


def test_an_unknown_check_is_refused() -> None:
    done = coattn("bench", "sessions", "--checks", "again,nothing")
    assert done.returncode == 2
    assert "There is no check 'nothing'." in done.stderr
    done = coattn("bench", "sessions", "--methods", "budget=3,full")
    assert done.returncode == 2
    assert "--methods begins with 'budget=3'." in done.stderr


def test_pairs_that_differ_are_told_from_those_that_do_not() -> None:
    dice = random.Random(0)
    noise = [dice.gauss(0, 1) for _ in range(50)]
    assert sooner([1 + x for x in noise], dice) < 0.001
    assert sooner([x - sum(noise) / 50 for x in noise], dice) > 0.3


def test_every_check_is_said_in_words() -> None:
    from coattn.evaluate.tables import kind_of

    done = coattn(
        "bench", "sessions", *TINY, "--tokens", "128", "--rounds", "1", "--questions", "2", "--new", "1",
        "--others", "1",
        "--pairs", "2", "--other-tokens", "40", "--methods", "cpu,window_blocks=2", "--checks", ",".join(WORDS),
        "--dtype", "float32", "--json",
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert kind_of(result) == "sessions"
    said = [row[-1] for row in session_rows(result)]
    assert len(said) == len(WORDS)
    for words, one in zip(("again", "questions", "steps of others", "computed", "salt"), said, strict=True):
        assert words in one
