"""One line of `scripts/prompt_checks.sh`, every ratio beside what is wanted: `prompt_table.py OUT NAME [SECONDS]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Check = tuple[str, float | None, float]
"""What it is, the ratio, and the most it should be."""
Rows = Callable[[str], dict[str, Any]]
"""The result of another line of the same folder."""


def row(result: dict[str, Any], method: str, chunk: int | None = None) -> dict[str, Any]:
    """A method's row; raises ValueError where it was refused."""
    rows = [each for each in result["rows"] if each["method"] == method]
    found: dict[str, Any] = next(each for each in rows if chunk is None or each["chunk"] == chunk)
    if found.get("refused"):
        raise ValueError(f"{method}: {found['refused']}")
    return found


def short(result: dict[str, Any], _others: Rows) -> Iterator[Check]:
    """A prompt of 32k."""
    full = row(result, "full", 8192)
    yield "full / floor", full["floor_ratio"], 1.3
    yield "full / Transformers", full["peer_ratio"], 0.9
    for each in result["rows"]:
        if each["method"] not in ("transformers", "full"):
            name, chunk = each["method"], each["chunk"]
            own, beside = row(result, name, chunk), row(result, "full", chunk)
            yield f"{name} / full at {chunk}", own["seconds"] / beside["seconds"], 1.15


def long(result: dict[str, Any], _others: Rows) -> Iterator[Check]:
    """A prompt of 128k."""
    full = row(result, "full")
    yield "full / floor", full["floor_ratio"], 1.2
    yield "full / Transformers", full["peer_ratio"], 1.0


def capped(result: dict[str, Any], _others: Rows) -> Iterator[Check]:
    """The same with a cap on GPU memory."""
    yield "offload under 2 GiB / full", row(result, "offload")["ratio"], 1.1


def beside(result: dict[str, Any], _others: Rows) -> Iterator[Check]:
    """Decoding while a prompt is read."""
    full = row(result, "full")
    yield "p99 between tokens / median without the prompt", full["between_ratio"], 3.0
    yield "the prompt / alone", full["prompt_ratio"], 1.3


def requests(_result: dict[str, Any], _others: Rows) -> Iterator[Check]:
    """A stream of requests: what it is compared with comes in lines of its own."""
    yield from ()


def scout(result: dict[str, Any], others: Rows) -> Iterator[Check]:
    """The same by scout."""
    yield "scout / full", row(result, "scout")["total_s"] / row(others("requests"), "full")["total_s"], 1.1


def transformers(result: dict[str, Any], others: Rows) -> Iterator[Check]:
    """The same by Transformers."""
    full, peer = row(others("requests"), "full"), row(result, "transformers")
    yield "full / Transformers", apiece(full) / apiece(peer), 1 / 2.5


def apiece(each: dict[str, Any]) -> float:
    """Seconds a request; Transformers may have done the first ones alone."""
    return float(each["total_s"] / each["requests"])


def answers(peer: dict[str, Any], count: int) -> float:
    """Seconds a request by Transformers for answers of `count` tokens, if its steps took what they took."""
    batches = {line["started_s"]: line for line in peer["timeline"]}.values()
    steps = [(line["ended_s"] - line["first_s"]) / (line["new_tokens"] - 1) for line in batches]
    lengths = [line["new_tokens"] for line in batches]
    more = sum((count - length) * step for length, step in zip(lengths, steps, strict=True))
    return float((peer["total_s"] + more) / peer["requests"])


def old(result: dict[str, Any], others: Rows) -> Iterator[Check]:
    """The same by an older tree."""
    yield "full / old full", row(others("requests"), "full")["total_s"] / row(result, "full")["total_s"], 0.75


def driven(result: dict[str, Any], others: Rows) -> Iterator[Check]:
    """Long answers with driven picks."""
    full = row(result, "full")
    yield "scout / full", row(result, "scout")["total_s"] / full["total_s"], 1 / 1.5
    try:
        peer = row(others("transformers"), "transformers")
    except FileNotFoundError:
        return
    yield "full / Transformers by its steps", apiece(full) / answers(peer, 1024), 1 / 6


LINES: dict[str, Callable[[dict[str, Any], Rows], Iterator[Check]]] = {
    "qwen": short,
    "llama": short,
    "long": long,
    "capped": capped,
    "beside": beside,
    "requests": requests,
    "where": requests,
    "scout": scout,
    "transformers": transformers,
    "old": old,
    "driven": driven,
}


def summary(folder: Path, name: str) -> str:
    """The ratios of a line, then what each row took."""

    def result(line: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / f"{line}.json").read_text(encoding="utf-8"))
        return found

    if name not in LINES:
        return "done"
    made = result(name)
    said = []
    try:
        said += [show(*check) for check in LINES[name](made, result)]
    except Exception as error:  # what was measured is said all the same
        said.append(f"{type(error).__name__}: {error}")
    return " | ".join(filter(None, ("; ".join(said), ", ".join(map(took, made["rows"])))))


def show(what: str, ratio: float | None, most: float) -> str:
    """One ratio."""
    if ratio is None:
        return f"{what} ? (wanted <= {most:.2f})"
    return f"{what} {ratio:.2f} (wanted <= {most:.2f}, {'yes' if ratio <= most else 'NO'})"


def took(each: dict[str, Any]) -> str:
    """Seconds of a row, and of how many requests."""
    seconds = each.get("seconds", each.get("total_s", each.get("prompt_beside_s")))
    chunk = f" {each['chunk']}" if each.get("chunk") else ""
    count = f" for {each['requests']} requests" if "requests" in each else ""
    return f"{each['method']}{chunk} " + ("refused" if each.get("refused") else f"{seconds:.2f} s{count}")


if __name__ == "__main__":
    folder, name, *seconds = sys.argv[1:]
    print(f"{name}{f' in {seconds[0]} s' if seconds else ''}: {summary(Path(folder), name)}")
