"""`bench beside` on a tiny model: every key that scripts rely on."""

from __future__ import annotations

import json

from tests.bench.test_decode import TINY, coattn


def test_both_sides_are_timed() -> None:
    size = ("--batch", "2", "--context", "40", "--tokens", "900", "--chunk", "64", "--methods", "full,scout")
    done = coattn("bench", "beside", *TINY, *size, "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    full, scout = json.loads(done.stdout)["rows"]
    for row in (full, scout):
        assert row["between_median_s"] > 0
        assert row["beside_p99_s"] >= row["beside_median_s"] > 0
        assert row["between_ratio"] == row["beside_p99_s"] / row["between_median_s"]
        assert row["prompt_ratio"] == row["prompt_beside_s"] / row["prompt_alone_s"]
        assert (row["error"], row["finished_early"]) == (None, 0)
    assert full["steps"] >= full["mixed_steps"] >= 900 // 64
    assert scout["mixed_steps"] == 0 or scout["not_mixed"] is None
