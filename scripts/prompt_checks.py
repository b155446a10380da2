"""Prompts and requests on a machine with a GPU, beside their floors and plain Transformers, in one process.

Usage: scripts/prompt_checks.sh OUT [LINE ...]      the lines of the first table if none is named

LINE          at most  what
requests        110 s  24 requests, 64 new tokens each, 12 GiB of GPU memory: full
where            80 s  8 of them under a profiler, full and scout: where the time goes
old              90 s  the 24 by `full` of an older tree: OLD=TARBALL
scout            90 s  the 24 by scout
transformers    190 s  as many of the 24 as Transformers begins in 100 s, in batches that fit
driven          200 s  the 24 with 1,024 new tokens each, driven picks: full, scout
llama            70 s  a prompt of 32k, Llama-3-8B: full, scout, hgca, hcattention by 8,192; Transformers
beside           60 s  8 sequences of 16k decode while a prompt of 64k is read, Qwen3-8B
long             80 s  a prompt of 128k: full, Transformers
capped           60 s  the same under 2 GiB of GPU memory: offload

qwen            120 s  a prompt of 32k, Qwen3-8B: full, scout, hgca, hcattention by 8,192 and 2,048; Transformers
kernels          90 s  TFLOP/s of each kernel

SHAPES=NAME measures other shapes in all lines: with one model, less time goes into making it.
The limits are for an H200. A model is made once for all of its lines. Each line prints one summary: every ratio, what
it should be at most, and whether it is, and writes OUT/LINE.json. A line that fails or takes too long says so; the
others go on.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prompt_table import summary
from prompt_where import lines, where

HERE = Path(__file__).resolve().parent
LIMITS = {
    "requests": 110, "where": 80, "old": 90, "scout": 90, "transformers": 190, "driven": 200, "llama": 70, "beside": 60,
    "long": 80, "capped": 60,
}  # fmt: skip
MORE = {"qwen": 120, "kernels": 90}
QWEN = ("beside", "long", "capped", "qwen")
"""Lines whose shapes are those of Qwen3-8B; of the others Llama-3-8B. Mistral-7B, for which the requests were first
measured, has Llama's layers."""
COUNT, PROMPTS, SEED, ROOM = 24, "uniform:4096:30720", 0, 12 << 30
PEER_S = 100
"""Seconds in which Transformers begins batches."""
FIRST = 8
"""Requests that are profiled."""


def shapes_of(line: str) -> str:
    """The shapes of a line's model."""
    return os.environ.get("SHAPES") or ("qwen3-8b" if line in QWEN else "llama-3-8b")


class TooLongError(Exception):
    """A line has taken all of its time."""


class Checks:
    """The lines over one folder of results."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._shapes, self._model = "", None

    def model(self, line: str) -> Any:
        """Made when a line first needs it; the one before makes room."""
        import torch

        from coattn.hf.random_model import random_model

        shapes = shapes_of(line)
        if shapes != self._shapes:
            self.drop()
            self._model, self._shapes = random_model(shapes, torch.device("cuda"), torch.bfloat16), shapes
        return self._model

    def drop(self) -> None:
        """Gives the model's memory back."""
        self._shapes, self._model = "", None
        self.rest()

    def rest(self) -> None:
        """Gives back what a line has left over."""
        import torch

        gc.collect()
        torch.cuda.empty_cache()

    def write(self, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
        """A result, as far as it is there."""
        from coattn.provenance import provenance

        known = {"shapes": shapes_of(name), "simulated": ["random weights", "random tokens"]}
        made = {"rows": rows, **known, **more, **provenance()}
        made["command"] = f"scripts/prompt_checks.sh OUT {name}"
        (self.out / f"{name}.json").write_text(json.dumps(made, indent=1), encoding="utf-8")

    def read(self, name: str, tokens: int, cases: list[tuple[str, int | None, int]], floor: bool = True) -> None:
        """Prompts, of each case its method, cap and chunk."""
        from coattn.bench import prefill

        model, rows = self.model(name), []
        least = prefill.floor_s(model, tokens) if floor else None
        for row in prefill.run(model, [prefill.Case(*case) for case in cases], tokens, least):
            rows.append(asdict(row))
            self.write(name, rows)

    def beside(self) -> None:
        from coattn.bench import beside

        setting = beside.Setting(8, 16384, 65536, {})
        self.write("beside", [beside.run(self.model("beside"), "full", setting)])

    def long(self) -> None:
        self.read("long", 1 << 17, [("transformers", None, 1 << 17), ("full", None, 8192)])

    def capped(self) -> None:
        """`full` of the line before, where it was run, and offload."""
        self.read("capped", 1 << 17, [("offload", 2 << 30, 8192)], floor=False)
        made, before = (self.out / f"{name}.json" for name in ("capped", "long"))
        rows = json.loads(made.read_text(encoding="utf-8"))["rows"]
        if not before.exists():
            self.read("long", 1 << 17, [("full", None, 8192)], floor=False)
        full = next(row for row in json.loads(before.read_text(encoding="utf-8"))["rows"] if row["method"] == "full")
        for row in rows:
            row["ratio"] = row["seconds"] / full["seconds"]
        self.write("capped", rows)

    def llama(self) -> None:
        whole = ("transformers", None, 32768)
        ours = [(method, None, 8192) for method in ("full", "scout", "hgca", "hcattention")]
        self.read("llama", 32768, [whole, *ours])

    def qwen(self) -> None:
        methods = ("full", "scout", "hgca", "hcattention")
        cases = [(method, None, chunk) for chunk in (8192, 2048) for method in methods]
        self.read("qwen", 32768, [("transformers", None, 32768), *cases])

    def requests(self) -> None:
        self.stream("requests", "fixed:64", ["full"], 16, None)

    def scout(self) -> None:
        self.stream("scout", "fixed:64", ["scout"], 16, None)

    def transformers(self) -> None:
        self.stream("transformers", "fixed:64", ["transformers"], 16, None)

    def where(self) -> None:
        """The first of the requests: enough for every kind of step."""
        from coattn.bench import requests, stream

        items = stream.draw(COUNT, PROMPTS, "fixed:64", "burst", SEED)
        most = max(item.prompt_tokens + item.new_tokens for item in items)
        setting = requests.Setting(16, most, ROOM, None, {})
        rows: list[dict[str, Any]] = []
        for method in ("full", "scout"):
            rows.append(where(self.model("where"), method, items[:FIRST], setting, SEED))
            self.write("where", rows)
            print("\n".join([f"{method}, {FIRST} requests:", *lines(rows[-1])]), flush=True)

    def driven(self) -> None:
        self.stream("driven", "fixed:1024", ["full", "scout"], 24, 0.124)

    def stream(self, name: str, new: str, methods: list[str], batch: int, change: float | None) -> None:
        """A burst of requests under each method."""
        from coattn.bench import requests, stream

        items = stream.draw(COUNT, PROMPTS, new, "burst", SEED)
        most = max(item.prompt_tokens + item.new_tokens for item in items)
        setting = requests.Setting(batch, most, ROOM, None, {}, change, peer_s=PEER_S)
        rows: list[dict[str, Any]] = []
        for row in requests.rows_of(self.model(name), [(each, {}) for each in methods], items, setting, SEED):
            rows.append(row)
            self.write(name, rows, stream=stream.describe(items), max_batch=batch, gpu_kv=ROOM, seed=SEED)

    def old(self) -> None:
        """In a process of its own: it is another coattn."""
        from coattn.bench import stream

        if not os.environ.get("OLD"):
            raise ValueError("OLD=TARBALL was not given")
        tree = self.out / "old"
        shutil.rmtree(tree, ignore_errors=True)
        with tarfile.open(os.environ["OLD"]) as packed:
            packed.extractall(tree, filter="data")
        source = next(tree.glob("**/src/coattn")).resolve()
        for built in (HERE.parent / "src" / "coattn").glob("_native*.so"):
            shutil.copy(built, source)  # it must be there, though `full` on a GPU attends to nothing with it
        items = stream.draw(COUNT, PROMPTS, "fixed:64", "burst", SEED)
        asked = {
            "shapes": shapes_of("requests"), "device": "cuda", "dtype": "bfloat16", "seed": SEED, "gpu_kv": ROOM,
            "max_batch": 16, "items": [(item.prompt_tokens, item.new_tokens) for item in items],
        }  # fmt: skip
        target = self.out / "old.json"
        command = [sys.executable, str(HERE / "old_requests.py"), str(source.parent), str(target)]
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command, input=json.dumps(asked), text=True, capture_output=True, env=own, timeout=LIMITS["old"]
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(" ".join(done.stderr.split())[-300:])
        self.write("old", json.loads(target.read_text(encoding="utf-8"))["rows"])

    def kernels(self) -> None:
        subprocess.run(
            [sys.executable, "-m", "coattn", "bench", "prompt-kernels", "--out", str(self.out / "kernels.json")],
            check=True, timeout=MORE["kernels"],
        )  # fmt: skip


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TooLongError when the time is over; a process that does not hear of it ends a while later."""

    def stop(*_: object) -> None:
        raise TooLongError(f"not done in {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + 30, exit=True)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Every line in its turn."""
    given = sys.argv[1:]
    if not given or given[0] in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(0 if given else 2)
    out, wanted = Path(given[0]), given[1:] or list(LIMITS)
    known = {**LIMITS, **MORE}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        sys.exit(f"error: there is no line {unknown[0]!r}\nhint: {', '.join(known)}")
    out.mkdir(parents=True, exist_ok=True)
    checks = Checks(out)
    for name in dict.fromkeys(wanted):
        (out / f"{name}.json").unlink(missing_ok=True)
        begin = time.perf_counter()
        run: Callable[[], None] = getattr(checks, name)
        failed = ""
        try:
            with limited(known[name]):
                run()
        except Exception as error:
            failed = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}; "
        checks.rest()
        said = summary(out, name) if (out / f"{name}.json").exists() else "nothing was measured"
        print(f"{name} in {time.perf_counter() - begin:.0f} s: {failed}{said}", flush=True)


if __name__ == "__main__":
    main()
