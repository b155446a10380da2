"""What `scripts/prompt_checks.sh` measured, line by line, beside what is wanted: `prompt_table.py OUT`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Check = tuple[str, float | None, float]
"""What it is, the ratio, and the most it should be."""


def row(result: dict[str, Any], method: str) -> dict[str, Any]:
    """A method's row; raises ValueError where it was refused."""
    found: dict[str, Any] = next(each for each in result["rows"] if each["method"] == method)
    if found.get("refused"):
        raise ValueError(f"{method}: {found['refused']}")
    return found


def short(name: str, result: dict[str, Any]) -> Iterator[Check]:
    """A prompt of 32k."""
    full = row(result, "full")
    yield f"{name}: full / floor", full["floor_ratio"], 1.3
    yield f"{name}: full / Transformers", full["peer_ratio"], 0.9
    for method in ("scout", "hgca", "hcattention"):
        yield f"{name}: {method} / full", row(result, method)["seconds"] / full["seconds"], 1.15


def long(name: str, result: dict[str, Any]) -> Iterator[Check]:
    """A prompt of 128k."""
    full = row(result, "full")
    yield f"{name}: full / floor", full["floor_ratio"], 1.2
    yield f"{name}: full / Transformers", full["peer_ratio"], 1.0


def capped(name: str, result: dict[str, Any]) -> Iterator[Check]:
    """The same with a cap on GPU memory."""
    yield f"{name}: offload under 2 GiB / full", row(result, "offload")["ratio"], 1.1


def beside(name: str, result: dict[str, Any]) -> Iterator[Check]:
    """Decoding while a prompt is read."""
    full = row(result, "full")
    yield f"{name}: p99 between tokens / without the prompt", full["between_ratio"], 3.0
    yield f"{name}: the prompt / alone", full["prompt_ratio"], 1.3


def requests(name: str, result: dict[str, Any]) -> Iterator[Check]:
    """A stream of requests."""
    full = row(result, "full")["total_s"]
    yield f"{name}: scout / full", row(result, "scout")["total_s"] / full, 1.1
    yield f"{name}: full / Transformers", full / row(result, "transformers")["total_s"], 1 / 2.5


LINES: dict[str, Callable[[str, dict[str, Any]], Iterator[Check]]] = {
    "qwen": short,
    "llama": short,
    "long": long,
    "capped": capped,
    "beside": beside,
    "requests": requests,
}


def main(folder: Path) -> None:
    """Prints every line that was measured."""
    found: dict[str, dict[str, Any]] = {}
    print(f"\n{'':52s} {'ratio':>7s} {'wanted':>7s}")
    for name, checks in LINES.items():
        path = folder / f"{name}.json"
        if not path.exists():
            print(f"{name}: nothing was measured")
            continue
        try:
            found[name] = json.loads(path.read_text(encoding="utf-8"))
            for what, ratio, most in checks(name, found[name]):
                show(what, ratio, most)
        except Exception as error:  # one line that is not whole must not hide the others
            print(f"{name}: {type(error).__name__}: {error}")
    try:
        old = json.loads((folder / "old.json").read_text(encoding="utf-8"))
        show("requests: full / old full", row(found["requests"], "full")["total_s"] / row(old, "full")["total_s"], 0.75)
    except Exception as error:
        print(f"old: {type(error).__name__}: {error}")
    for name, result in found.items():
        for each in result["rows"]:
            seconds = each.get("seconds", each.get("total_s", each.get("prompt_beside_s")))
            took = each["refused"] if each.get("refused") else f"{seconds:.2f} s"
            print(f"  {name} {each['method']} {took}")


def show(what: str, ratio: float | None, most: float) -> None:
    """One line."""
    if ratio is None:
        print(f"{what:52s} {'?':>7s} {most:7.2f}")
    else:
        print(f"{what:52s} {ratio:7.2f} {most:7.2f} {'yes' if ratio <= most else 'NO'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
