"""Times decode steps of two source trees in turns, in one run on one machine.

    python lab/scripts/compare_trees.py OLD NEW OUT [--turns 5] [--seconds 240] -- WORD...

OLD and NEW are checkouts with `src` and `lab`, each with its C++ core built. WORD... is what `coattn-lab bench decode`
takes, such as `--methods full,scout --batch 4 --context 32768`. Both trees prepare a row at the same time, in processes
of their own; then they time its steps in turns, so that a machine that gets slower slows both. OUT receives
compare.json: of each row the medians of its turns, and NEW over OLD.

A process that fails or is late ends the run at once; the rows that both have stay.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.002
STEPS_PER_TURN = 14
LEFT = ("failed", "ready?", "done?", "rows?.json", "result?.json")
"""What a run before has left in its folder: turns that are over already."""


class Turns:
    """Two processes that take turns by files in a folder: each says which turn it has ended."""

    def __init__(self, folder: Path, own: int, deadline: float) -> None:
        self.folder, self.own, self.deadline, self.ended = folder, own, deadline, 0

    def wait(self) -> None:
        """Returns when it is this process's turn: the old tree's first, both are ready."""
        self._say("ready", self.ended)
        while self._said("ready", 1 - self.own) < self.ended or self._done() != 2 * self.ended + self.own:
            if time.time() > self.deadline or (self.folder / "failed").exists():
                raise TimeoutError("the other tree does not take its turn")
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        self.ended += 1
        self._say("done", self.ended)

    def _done(self) -> int:
        return max(0, self._said("done", 0)) + max(0, self._said("done", 1))

    def _say(self, what: str, value: int) -> None:
        path = self.folder / f"{what}{self.own}"
        path.with_suffix(".new").write_text(str(value))
        path.with_suffix(".new").replace(path)

    def _said(self, what: str, who: int) -> int:
        path = self.folder / f"{what}{who}"
        return int(path.read_text()) if path.exists() else -1


def work(folder: Path, own: int, turns: int, deadline: float, words: list[str]) -> None:
    """One tree: its `bench decode`, whose timing waits for its turns."""
    try:
        _work(folder, own, turns, deadline, words)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and not error.code):
            (folder / "failed").touch()
        raise


def _work(folder: Path, own: int, turns: int, deadline: float, words: list[str]) -> None:
    from coattn_lab.bench import decode, limits
    from coattn_lab.cli.main import main

    line = Turns(folder, own, deadline)
    whole: Callable[..., Any] = limits.measure
    rows: list[list[float]] = []

    def measure(*given: Any, **named: Any) -> Any:
        line.wait()
        found = whole(*given, **named)
        line.end()
        return found

    def timed(step: Callable[[], object], *_limits: object) -> list[float]:
        medians, every = [], []
        for _ in range(turns):
            line.wait()
            taken = []
            for _ in range(STEPS_PER_TURN):
                start = time.perf_counter()
                step()
                taken.append(time.perf_counter() - start)
            line.end()
            medians.append(statistics.median(taken[2:]))
            every += taken[2:]
        rows.append(medians)
        (folder / f"rows{own}.json").write_text(json.dumps(rows))
        return every

    limits.measure = measure
    decode._time = timed
    # beside what is timed, nothing is measured: it would come while the other tree is timed
    decode.kv.dram_gbps = lambda *_given: limits_of(folder, own)
    steps = str(turns * STEPS_PER_TURN + 2)
    sys.argv = ["coattn-lab", "bench", "decode", *words, "--steps", steps, "--out", str(folder / f"result{own}.json")]
    main()


def limits_of(folder: Path, own: int) -> float:
    """GB/s that DRAM was read at before the first row."""
    path = folder / f"result{own}.json"
    return float(json.loads(path.read_text())["limits"]["dram_gbps"]) if path.exists() else 1.0


def main() -> int:
    """Starts both trees, prints a table."""
    cut = sys.argv.index("--")
    old, new, out, *options = sys.argv[1:cut]
    given = dict(zip(options[::2], options[1::2], strict=True))
    turns, seconds = int(given.get("--turns", 5)), float(given.get("--seconds", 240))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for left in (path for name in LEFT for path in folder.glob(name)):
        left.unlink()
    workers = []
    for own, tree in enumerate((old, new)):
        paths = os.pathsep.join((f"{tree}/src", f"{tree}/lab", os.environ.get("PYTHONPATH", "")))
        own_words = [str(folder), str(own), str(turns), str(time.time() + seconds), *sys.argv[cut + 1 :]]
        with (folder / f"log{own}").open("w") as log:
            command = [sys.executable, __file__, "--work", *own_words]
            workers.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=log, stderr=log))
    codes = [worker.wait() for worker in workers]
    missing = [own for own in (0, 1) if not (folder / f"result{own}.json").exists()]
    if missing:
        print(f"No row came of {(old, new)[missing[0]]}; see {folder / f'log{missing[0]}'}.", file=sys.stderr)
        return 1
    timed = [json.loads((folder / f"rows{own}.json").read_text()) for own in (0, 1)]
    results = [json.loads((folder / f"result{own}.json").read_text()) for own in (0, 1)]
    rows = []
    for row, before, after in zip(results[1]["rows"], *timed, strict=False):
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        name = " ".join([row["method"], *(f"{k}={v}" for k, v in row["params"].items())])
        rows.append({"row": name, "old_ms": [x * 1e3 for x in before], "new_ms": [x * 1e3 for x in after]})
        rows[-1] |= {"new_over_old": ratio, "floor_ms": row["floor_ms"]}
        a, b = (statistics.median(x) * 1e3 for x in (before, after))
        print(f"{name}: {a:.2f} -> {b:.2f} ms, new/old {ratio:.3f}, floor {row['floor_ms']:.2f}")
    made = {"rows": rows, "limits": results[1]["limits"], "codes": codes, "words": sys.argv[cut + 1 :]}
    (folder / "compare.json").write_text(json.dumps(made, indent=1) + "\n")
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), sys.argv[6:])
    else:
        sys.exit(main())
