"""Write the table of README.md between its markers, from five results of `coattn-lab eval table`.

Usage: python lab/scripts/make_results.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from coattn.errors import InputError
from coattn_lab.evaluate.results import fault, read_result
from coattn_lab.evaluate.tasks.table import lines, markdown, read_results

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "results/tasks_16k"
METHODS = ("full", "auto", "hcattention", "scout", "hgca")
LENGTH = 16384
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
HEAD = (
    "method", "KV in GPU memory", "KV read in a step", "ms a step",
    "RULER, question fed", "RULER, question read", "needles, question fed", "KL", "file",
)  # fmt: skip


def main() -> None:
    """Replaces the block between the markers."""
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{block()}{END}{after}", encoding="utf-8")
    print("wrote README.md")


def block() -> str:
    """The table, and a sentence about how it was measured."""
    found = lines(read_results([ROOT / FOLDER]))
    rows = [cells(name, [line for line in found if line["row"].split(",")[0] == name]) for name in METHODS]
    data = read_result(ROOT / FOLDER / "full.json")
    why = fault(data)
    if why is not None:
        raise InputError(f"{FOLDER}/full.json may not be published: {why}.", "Make it again from a clean commit.")
    scored = sum(item["benchmark"] == "ruler" and item["mode"] == "fed" for item in data["items"])
    about = (
        f"{data['model'].split('@')[0]} in {data['dtype']} on one {data['hardware']['gpu']}, prompts of "
        f"{LENGTH:,} tokens, {data['runs'][str(LENGTH)]['batch']} sequences at a time. Methods other than `full` get "
        "12.5% of the KV cache as GPU memory. Scores are percentages with 95% intervals over "
        f"{scored} prompts of RULER's 13 tasks. KL is from `full`, in nats, along its answers. *Fed* means that the "
        "method sees the question only after the prompt was read. "
        f"Measured at commit {data['commit'][:7]}, {age(data['commit'])} commits before this table was written: the "
        "code and the defaults of `auto` have changed since. [All results, with their commands](results/README.md)."
    )
    return f"{markdown(HEAD, rows)}\n{about}\n"


def cells(name: str, found: list[dict[str, Any]]) -> list[str]:
    """A row of the table: fed, read."""
    by = {line["mode"]: line for line in found if line["length"] == LENGTH}
    fed, read = by["fed"], by["read"]
    kl = fed["answer_kl"]
    return [
        f"`{name}`",
        f"{fed['gpu_share']:.0%}",
        f"{fed['read_share']:.0%}",
        f"{fed['ms_per_step']:.1f}",
        *(score(each) for each in (fed["ruler"], read["ruler"], fed["needle"])),
        "" if kl is None or name == "full" else f"{kl['kl']:.2g}",
        f"[json]({FOLDER}/{fed['files'][0]})",
    ]


def score(found: dict[str, Any]) -> str:
    """`51.5 (44.7 to 57.3)`."""
    spread = found["score_95"]
    return f"{found['score']:.1f}" + ("" if spread is None else f" ({spread[0]:.1f} to {spread[1]:.1f})")


def age(commit: str) -> int:
    """How many commits lie between a result and the present one."""
    command = ["git", "rev-list", "--count", f"{commit}..HEAD"]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
