"""Whether the second of two API keys gets an answer sooner because the first has asked the same: a paired test.

    coattn serve --api-key-file KEYS &
    scripts/tenant_timing.py http://127.0.0.1:8000 --first KEY --second OTHER

For each of many prompts: the time to the first token for the first key, for the second key, and for the first key once
more, which must be sooner, or the measurement sees nothing. Exit code 1: the second key is sooner, or nothing is seen.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time

import httpx2 as httpx

WORDS = ("salt", "river", "seven", "cold", "north", "paper")
FLIPS = 20_000
"""Random signs that the test draws."""


def first_token(client: httpx.Client, url: str, key: str, prompt: str) -> tuple[float, int]:
    """Seconds until the first token of an answer, and the tokens of the prompt that were stored already."""
    asked = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    start, seconds, cached = time.perf_counter(), 0.0, 0
    headers = {"Authorization": f"Bearer {key}"}
    with client.stream("POST", f"{url}/v1/completions", json=asked, headers=headers) as got:
        got.raise_for_status()
        for line in got.iter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line.removeprefix("data: "))
            if part.get("choices") and not seconds:
                seconds = time.perf_counter() - start
            if part.get("usage"):
                cached = part["usage"]["prompt_tokens_details"]["cached_tokens"]
    return seconds, cached


def sooner(differences: list[float], dice: random.Random) -> float:
    """Chance of a mean as large as this one if every difference could as well have the other sign."""
    total = sum(differences)
    above = sum(sum(d if dice.random() < 0.5 else -d for d in differences) >= total for _ in range(FLIPS))
    return (above + 1) / (FLIPS + 1)


def main() -> int:
    """Asks, prints and tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--first", required=True, help="An API key.")
    parser.add_argument("--second", required=True, help="Another one.")
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--words", type=int, default=400, help="Words of a prompt.")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    times: list[list[float]] = []
    stored = [0, 0, 0]
    with httpx.Client(timeout=600) as client:
        for i in range(given.pairs + 2):
            prompt = " ".join(dice.choice(WORDS) for _ in range(given.words))
            found = [first_token(client, given.url, key, prompt) for key in (given.first, given.second, given.first)]
            if i >= 2:  # the first ones warm up
                times.append([seconds for seconds, _ in found])
                stored = [had + cached for had, (_, cached) in zip(stored, found, strict=True)]
    names = ("first key", "second key", "first key again")
    for name, each, cached in zip(names, zip(*times, strict=True), stored, strict=True):
        print(f"{name:16} median {statistics.median(each) * 1e3:8.2f} ms, {cached:,} tokens were stored")
    second = sooner([row[0] - row[1] for row in times], dice)
    again = sooner([row[0] - row[2] for row in times], dice)
    print(f"{given.pairs} pairs; chance that it is chance: second key sooner p={second:.4f}, first again p={again:.4f}")
    if again > 0.01:
        print("A hit is not seen in the times: use longer prompts, or a quieter machine.", file=sys.stderr)
    if second < 0.01 or stored[1]:
        print("The second key is sooner.", file=sys.stderr)
    return int(again > 0.01 or second < 0.01 or stored[1] > 0)


if __name__ == "__main__":
    sys.exit(main())
