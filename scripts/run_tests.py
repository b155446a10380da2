"""Runs the tests in tiers, the quick ones first, and ends with one line for all of them, as pytest writes it.

    python scripts/run_tests.py                         quick tests, then those marked slow or model
    python scripts/run_tests.py tests/cache -k table    what pytest makes of these words, in one tier

A tier's name and its seconds are appended to the file $COATTN_TIERS, where that is set.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

TIERS = {"quick tests": "not slow and not model", "slow and model tests": "slow or model"}
"""Name -> marks. Every test is in one of them."""
PARALLEL = ("-n", "auto", "--dist", "loadfile", "-q")
NOTHING = 5
"""pytest's exit code where it found no test."""
CLOSING = re.compile(r"^=* ?((?:\d+ [a-z]+)(?:, \d+ [a-z]+)*) in [\d.]+s\b")
"""pytest's last line."""
ORDER = ("failed", "passed", "skipped", "xfailed", "xpassed", "warnings", "errors")
"""As pytest names them there."""


def read_closing(line: str) -> Counter[str] | None:
    """`"3 failed, 40 passed, 1 error in 2.0s"` -> its counts; None: it is no such line."""
    found = CLOSING.match(line)
    if found is None:
        return None
    words = (part.split() for part in found[1].split(", "))
    return Counter({f"{word}s" if word in ("error", "warning") else word: int(count) for count, word in words})


def write_closing(counts: Counter[str], seconds: float) -> str:
    """The same the other way round; `deselected` counts what another tier runs, and is left out."""
    parts = [f"{counts[word]} {word}" for word in ORDER if counts[word]] or ["no tests ran"]
    return f" {', '.join(parts)} in {seconds:.2f}s ".center(80, "=")


def run(arguments: Sequence[str]) -> tuple[int, Counter[str]]:
    """pytest with these arguments -> its exit code and its counts; what it prints is passed on."""
    counts: Counter[str] = Counter()
    with subprocess.Popen([sys.executable, "-m", "pytest", *arguments], stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            counts = read_closing(line) or counts
    return tests.returncode, counts


def main(words: Sequence[str]) -> int:
    """Runs what the words ask for -> an exit code: 0, or that of the first tier that failed."""
    if words:
        return run([*PARALLEL, *words])[0]
    begun, code, total, said = time.monotonic(), 0, Counter[str](), []
    for name, marks in TIERS.items():
        start = time.monotonic()
        print(f"== {name}", flush=True)
        ended, counts = run([*PARALLEL, "-m", marks])
        code, total = code or (0 if ended == NOTHING else ended), total + counts
        said.append((name, time.monotonic() - start))
    for name, seconds in said:
        print(f"{name}: {seconds:.0f} s")
    if "COATTN_TIERS" in os.environ:
        with open(os.environ["COATTN_TIERS"], "a", encoding="utf-8") as file:
            file.writelines(f"{name}: {seconds:.0f} s\n" for name, seconds in said)
    print(write_closing(total, time.monotonic() - begun))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
